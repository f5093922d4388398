"""The keys of one run: what each role's key file holds, and nothing a role does not need.

    manager.key    own pair, the agents' and the trainer's public keys (its allow-lists), the operator's HTTP token, and
                   the identity key, by which it knows engines that were named (see `wire.engine_identity`)
    trainer.key    own pair, the manager's public key (it dials), the agents' public key (its publisher's allow-list)
    agent.key      own pair, the manager's and the trainer's public keys (it dials both), which a run's agents share; in
                   each agent's own file, which has the engine's name, the proof that the engine was named, too
    operator.key   the HTTP token and the identity key, and nothing of CURVE

A key is a CURVE25519 key as 40 characters of Z85 (ZeroMQ RFC 32), or a random HTTP token. Files are JSON, mode 0600, in
a folder of mode 0700; in pods they are root's, and our group may read them. A refused file raises InvalidData with one
sentence that never quotes a secret.
"""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import msgspec

from polyrl.errors import UNDECODABLE, InvalidData

Z85_KEY_LENGTH: Final = 40
"""Characters of a 32-byte key in Z85: five for every four bytes."""

MIN_TOKEN_LENGTH: Final = 32
"""Characters of an HTTP bearer token: 24 random bytes in URL-safe base64, beyond guessing."""

OTHERS_ACCESS: Final = 0o077
"""Permission bits that nobody but the owner may have on a key file."""

LENT_ACCESS: Final = 0o040
"""The one of them that the group of a file of root's may have: so Kubernetes hands a Secret to a pod's fsGroup."""

ROOT: Final = 0

_Z85_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_Z85_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_TOKEN = re.compile(rf"[A-Za-z0-9_\-]{{{MIN_TOKEN_LENGTH},}}")


class _Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Base of all key files; its repr holds no value, so that a log line never does."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"


class ManagerKeys(_Keys, frozen=True):
    """What the manager holds."""

    public_key: str
    secret_key: str
    agent_public_key: str
    """The only key its agents' socket lets in."""
    trainer_public_key: str
    """The only key its trainer's socket lets in."""
    http_token: str
    identity_key: str
    """What proofs of engines' names are made and checked with."""


class TrainerKeys(_Keys, frozen=True):
    """What the trainer holds; its own pair also serves its publisher."""

    public_key: str
    secret_key: str
    manager_public_key: str
    agent_public_key: str
    """The only key its publisher's socket lets in."""


class AgentKeys(_Keys, frozen=True):
    """What every agent of a run holds, and with a name what one engine's agent does."""

    public_key: str
    secret_key: str
    manager_public_key: str
    trainer_public_key: str
    """The publisher's CURVE server key."""
    engine: str = ""
    """Engine that an agent may speak for; empty in the run's own file, from which agents' are made."""
    proof: str = ""
    """Proof that the agent may speak for it (see `wire.engine_identity`)."""


class OperatorKeys(_Keys, frozen=True):
    """What the operator, or the local runner, holds."""

    http_token: str
    identity_key: str


RoleKeys: TypeAlias = ManagerKeys | TrainerKeys | AgentKeys | OperatorKeys
K = TypeVar("K", bound=_Keys)

FILE_NAMES: Final[dict[type[_Keys], str]] = {
    ManagerKeys: "manager.key",
    TrainerKeys: "trainer.key",
    AgentKeys: "agent.key",
    OperatorKeys: "operator.key",
}


def is_z85_key(text: str) -> bool:
    """True when `text` can be a CURVE key in Z85."""
    return _Z85_KEY.fullmatch(text) is not None


def key_bytes(text: str) -> bytes:
    """The 32 bytes of a CURVE25519 key in Z85 (ZeroMQ RFC 32): five digits of base 85 for every four bytes.

    Raises InvalidData for digits that stand for no bytes."""
    groups = [text[begin : begin + 5] for begin in range(0, Z85_KEY_LENGTH, 5)]
    numbers = [sum(_Z85_DIGITS.index(digit) * 85**place for place, digit in enumerate(reversed(g))) for g in groups]
    if max(numbers) >= 1 << 32:
        raise InvalidData("a CURVE key stands for no 32 bytes")
    return b"".join(number.to_bytes(4, "big") for number in numbers)


def format_keys(keys: RoleKeys) -> str:
    """The text of a key file."""
    return msgspec.json.format(msgspec.json.encode(keys)).decode() + "\n"


def parse_keys(kind: type[K], text: str | bytes, source: str) -> K:
    """The keys in `text`, each checked for its shape. Raises InvalidData naming `source` and the field."""
    try:
        keys = msgspec.json.decode(text, type=kind)
    except UNDECODABLE as error:
        raise InvalidData(f"{source}: not a key file of {FILE_NAMES[kind].removesuffix('.key')}: {error}") from None
    for field in msgspec.structs.fields(kind):
        _check_field(field.encode_name, getattr(keys, field.name), source)
    return keys


def leave_no_core_dump() -> None:
    """This process, and all that it starts from here on, leaves none: keys would stand in it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def read_keys(kind: type[K], path: Path) -> K:
    """The keys in the file at `path`. Raises InvalidData when it is absent, readable by others, or malformed. From here
    on this process, and all that it starts, leaves no core dump, in which they would stand."""
    leave_no_core_dump()
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read()
    except OSError as error:
        raise InvalidData(f"{path}: cannot read the key file: {error.strerror}") from None
    if is_exposed(status, os.geteuid(), {os.getegid(), *os.getgroups()}):
        mode = status.st_mode & 0o777
        raise InvalidData(f"{path}: other users may read this key file (mode {mode:04o}); it must be 0600")
    return parse_keys(kind, text, str(path))


def is_exposed(status: os.stat_result, user: int, groups: set[int]) -> bool:
    """True when a file is open to others than us, a process of `user` in `groups`."""
    open_to = status.st_mode & OTHERS_ACCESS
    lent = status.st_uid == ROOT and user != ROOT and status.st_gid in groups
    return bool(open_to & ~LENT_ACCESS if lent else open_to)


def _check_field(name: str, value: str, source: str) -> None:
    if name in ("httpToken", "identityKey"):
        if _TOKEN.fullmatch(value) is None:
            raise InvalidData(f"{source}: {name} is not {MIN_TOKEN_LENGTH} or more URL-safe characters")
    elif name not in ("engine", "proof") and not is_z85_key(value):
        raise InvalidData(f"{source}: {name} is not a CURVE key of {Z85_KEY_LENGTH} Z85 characters")
