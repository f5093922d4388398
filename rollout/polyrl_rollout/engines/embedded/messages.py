"""What the embedded engine and its process send each other: one msgpack array per frame, its length in front.

Both ends run the same code from the same installation, so frames carry no version.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

import msgspec

from polyrl.sample import Finish
from polyrl.wire import EngineCapacity
from polyrl_rollout.engines.port import GenerateRequest, LoadSeconds

LENGTH: Final = struct.Struct("<I")
"""Frame length in bytes, in front of each frame."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag_field=None):
    """Base of all messages."""


# --- parent -> process ------------------------------------------------------------------------------------------------


class StartEngine(_Message, frozen=True, tag="start"):
    """First message; answered by Started or Failed."""

    folder: str
    capacity: EngineCapacity
    """What is asked for; Started answers with what there is."""
    threads: int


class Generate(_Message, frozen=True, tag="generate"):
    """Answered by Tokens until one row has a finish."""

    request: GenerateRequest


class Abort(_Message, frozen=True, tag="abort"):
    """Not answered; rows of `rid` that are already on their way may still come."""

    rid: str


class Load(_Message, frozen=True, tag="load"):
    """Answered by Loaded or LoadFailed."""

    version: int
    folder: str
    keep: bool
    """Running requests go on; otherwise they are dropped."""


class Ping(_Message, frozen=True, tag="ping"):
    """Answered by Pong while the generation loop is alive."""


# --- process -> parent ------------------------------------------------------------------------------------------------


class Started(_Message, frozen=True, tag="started"):
    """The model is built and the generation loop runs."""

    capacity: EngineCapacity


class Row(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request."""

    rid: str
    ids: list[int]
    logprobs: list[float]
    finish: Finish | None


class Tokens(_Message, frozen=True, tag="tokens"):
    """All new tokens of one forward pass."""

    version: int
    rows: list[Row]


class Loaded(_Message, frozen=True, tag="loaded"):
    version: int
    seconds: LoadSeconds


class LoadFailed(_Message, frozen=True, tag="load-failed"):
    """The old weights serve on."""

    version: int
    reason: str


class Pong(_Message, frozen=True, tag="pong"):
    pass


class Failed(_Message, frozen=True, tag="failed"):
    """The process ends."""

    reason: str


ToProcess: TypeAlias = StartEngine | Generate | Abort | Load | Ping
ToParent: TypeAlias = Started | Tokens | Loaded | LoadFailed | Pong | Failed

_encoder: Final = msgspec.msgpack.Encoder()
decode_to_process: Final = msgspec.msgpack.Decoder(ToProcess).decode
decode_to_parent: Final = msgspec.msgpack.Decoder(ToParent).decode


def frame(message: ToProcess | ToParent) -> bytes:
    """The message as one length-prefixed frame."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body
