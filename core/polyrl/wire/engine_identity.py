"""Whom an agent may speak for. All agents of a run have one CURVE key, which lets them in; each has a proof of its own
that its engine was named by who starts the run's workers: the operator, or the runner of a laptop.

A proof is an HMAC over the engine's name, with a key that the manager and who names engines hold. It travels in the
agent's ZeroMQ identity, NAME/PROOF/PROCESS, inside the encrypted handshake: so a peer is refused before any of its
frames counts, and takes the place of another connection only with the proof of that connection's name.

PROCESS is drawn by each process of an agent and kept nowhere. So one whose connection broke goes on at once, as itself,
and whoever else has the same proof has to wait until it has been silent for its lease.

A trainer's pods are named by their Job, so the proof of the engine beside the trainer is for the beginning of their
names: all but the last two parts, and a star.
"""

from __future__ import annotations

import base64
import hmac
import re
import secrets
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from polyrl.keys import FILE_NAMES, AgentKeys, OperatorKeys, read_keys

ENGINE_NAME: Final = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
"""Names that an engine may have; a pod's fits, and the name fits a log line."""

JOB_POD_PARTS: Final = 2
"""Parts that a Job adds to its own name for a pod's: index and random letters."""

RESERVED_PROCESS: Final = re.compile(r"reserved(-[0-9]+)?")
"""Names of the engine beside the trainer where workers are processes: the first one's, and its successors'."""

UNPROVEN: Final = "no such engine was named for this run: the proof in the agent's key file is of none, or of another"
"""Reason of a Fenced that no further greeting can change."""


NOT_RESERVED: Final = "it greets as the engine beside the trainer, and its proof is a rollout's"
"""Reason of a Fenced that no further greeting can change."""

IN_USE: Final = "another process with this engine's proof is connected; it is waited for until it falls silent"
"""Reason of a Fenced that passes by itself once an agent's process before has died."""

REVOKED: Final = "the pod of this engine is gone, and its proof with it"
"""Reason of a Fenced that no further greeting can change, either."""

PROCESS_NAME_BYTES: Final = 9
"""Enough that nobody guesses it."""


def draw_process() -> str:
    """What one process of an agent is known by, for as long as it lives."""
    return secrets.token_urlsafe(PROCESS_NAME_BYTES)


def identity_of(engine: str, keys: AgentKeys, process: str = "") -> bytes:
    """ZeroMQ identity of this process of the agent of `engine`."""
    return f"{engine}/{keys.proof}/{process}".encode()


def proven_engine(identity: bytes, identity_key: str) -> str | None:
    """The engine that a peer of this ZeroMQ identity speaks for; None: it proves none."""
    name, _, rest = identity.partition(b"/")
    proof = rest.partition(b"/")[0]
    if ENGINE_NAME.fullmatch(name) is None:
        return None
    engine = name.decode("ascii")
    rights = (_proof(scope, identity_key).encode() for scope in (engine, _job_scope(engine)))
    return engine if any(hmac.compare_digest(proof, right) for right in rights) else None


def is_reserved(identity: bytes, identity_key: str) -> bool:
    """Whether the proof in it is the trainer's: of the beginning of its pods' names, or on a laptop of its engine."""
    name, _, rest = identity.partition(b"/")
    proof, engine = rest.partition(b"/")[0], name.decode("ascii", "replace")
    scope = engine if RESERVED_PROCESS.fullmatch(engine) else _job_scope(engine)
    return hmac.compare_digest(proof, _proof(scope, identity_key).encode())


def _job_scope(engine: str) -> str:
    return "-".join([*engine.split("-")[:-JOB_POD_PARTS], "*"])


def agent_keys_of(keys: AgentKeys, identity_key: str, engine: str) -> AgentKeys:
    """The run's agents' keys as those of `engine`: a name, or a beginning of names and a star."""
    return replace(keys, engine=engine, proof=_proof(engine, identity_key))


def engine_keys(folder: Path, engine: str) -> AgentKeys:
    """Keys of `engine`, from a run's folder of keys, for who starts it. Raises InvalidData."""
    keys = read_keys(AgentKeys, folder / FILE_NAMES[AgentKeys])
    return agent_keys_of(keys, read_keys(OperatorKeys, folder / FILE_NAMES[OperatorKeys]).identity_key, engine)


def _proof(engine: str, identity_key: str) -> str:
    digest = hmac.digest(identity_key.encode(), b"polyrl engine " + engine.encode(), "sha256")
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
