"""Makes the keys of one run: three CURVE pairs and one HTTP token, handed out as `polyrl.keys` says who needs what."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import zmq

from polyrl.errors import InvalidData
from polyrl.keys import FILE_NAMES, AgentKeys, ManagerKeys, OperatorKeys, TrainerKeys, format_keys

TOKEN_BYTES = 32
"""Randomness of the HTTP token; 256 bits, as many as the CURVE keys have."""


def write_run_keys(folder: Path) -> None:
    """Writes one file per role (mode 0600) into `folder`, which is made (mode 0700) when absent.

    Raises InvalidData when a key file is already there: running processes hold it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    for keys in make_run_keys():
        _write_private(folder / FILE_NAMES[type(keys)], format_keys(keys))


def make_run_keys() -> tuple[ManagerKeys, TrainerKeys, AgentKeys, OperatorKeys]:
    """Fresh keys for every role of one run."""
    (manager, manager_secret), (trainer, trainer_secret), (agent, agent_secret) = (_pair() for _ in range(3))
    token = secrets.token_urlsafe(TOKEN_BYTES)
    return (
        ManagerKeys(manager, manager_secret, agent_public_key=agent, trainer_public_key=trainer, http_token=token),
        TrainerKeys(trainer, trainer_secret, manager_public_key=manager, agent_public_key=agent),
        AgentKeys(agent, agent_secret, manager_public_key=manager, trainer_public_key=trainer),
        OperatorKeys(http_token=token),
    )


def _pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _write_private(path: Path, text: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InvalidData(f"{path}: a key file is already there; a run's keys are made once") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
