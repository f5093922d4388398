"""What goes between the trainer and a worker of user code: length-prefixed msgpack over a socket pair, plain data only.

trainer ──Setup──> worker ──CodeLoaded──> trainer ──Call──────────> worker ──Answer──> trainer
                                                  ──Turn or Ended──>        (of an environment)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Any, Final

import msgspec
import numpy as np

from polyrl.sample import DiscardReason
from polyrl_trainer.sample import Sample

HEADER_BYTES: Final = 4
MAX_FRAME_BYTES: Final = 2**30
"""A group of long samples takes megabytes; a worker that announces more than this is not believed."""
_ARRAYS: Final = ("tokens", "loss_mask", "rollout_log_probs")
"""Fields that user code reads; the learner's further arrays stay with it."""
_TAG: Final = "polyrl:type"
_SPECIAL: Final[dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]]] = {
    datetime: (datetime.isoformat, datetime.fromisoformat),
    date: (date.isoformat, date.fromisoformat),
    time: (time.isoformat, time.fromisoformat),
    timedelta: (lambda value: value / timedelta(microseconds=1), lambda number: timedelta(microseconds=number)),
    Decimal: (str, Decimal),
    bytes: (bytes.hex, bytes.fromhex),
}
"""What parquet holds beside JSON's types."""
_BY_NAME: Final = {kind.__name__: kind for kind in _SPECIAL}


class WireSample(msgspec.Struct, frozen=True):
    """A `Sample` as bytes and text."""

    arrays: dict[str, tuple[str, bytes]]
    """By field, dtype and content."""
    prompt_length: int
    id: str
    group: int
    prompt: str
    response: str
    reward: float
    finish_reason: str
    turn_rewards: tuple[float, ...]
    turn_starts: tuple[int, ...]
    versions: tuple[int, ...]
    metadata: str
    """JSON, because msgpack's integers end at 64 bits."""


class Serves(StrEnum):
    """What a worker calls."""

    REWARD = "reward"
    """A function of one sample, which gives its reward."""
    BATCH = "batch"
    """`score_batch`, a function of several samples, whichever are there."""
    GROUP = "group"
    """`score_group`, a function of all samples of a prompt."""
    FILTER = "filter"
    """A function of a group's samples, which says whether they may train."""
    ENVIRONMENT = "environment"
    """A class whose one object plays conversations."""

    @classmethod
    def of(cls, function: str) -> Serves:
        """What the name of a reward, `module:function`, asks for."""
        return {"score_batch": cls.BATCH, "score_group": cls.GROUP}.get(function.partition(":")[2], cls.REWARD)


class Setup(msgspec.Struct, frozen=True):
    """The first message: what this worker serves, and its limits."""

    function: str
    """`module:function`"""
    code_path: str
    serves: Serves
    memory_bytes: int
    timeout_s: float = 0.0
    """An environment's, for each turn; a call brings its own."""


class CodeLoaded(msgspec.Struct, frozen=True):
    """The code is imported, or why it cannot be."""

    is_async: bool = False
    invalid: str = ""


class Call(msgspec.Struct, frozen=True):
    """One call of the function."""

    id: str
    samples: tuple[WireSample, ...]
    timeout_s: float


class Turn(msgspec.Struct, frozen=True, tag=True):
    """The policy's turn of a conversation, which has the sample's id."""

    sample: WireSample
    begins: bool
    """A fresh environment plays from here on."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Nobody asks for this conversation any more."""

    id: str


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """A reward; the reason for none; an environment's text with the turn's reward, no text at the episode's end;
    nothing where a filter lets the group pass."""

    reward: float | None = None
    metrics: dict[str, float] = {}
    text: str | None = None
    truncated: bool = False
    reason: DiscardReason | None = None
    detail: str = ""


class Answer(msgspec.Struct, frozen=True):
    """What came of a call or a turn."""

    id: str
    outcomes: tuple[Outcome, ...]
    """One for each sample of a call of a reward, else one."""


def to_frame(message: msgspec.Struct) -> bytes:
    """With its length before it."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def body_length(header: bytes) -> int:
    """Raises ValueError for a length that no message has."""
    length = int.from_bytes(header, "big")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes")
    return length


def to_wire(sample: Sample) -> WireSample:
    """All that user code may read."""
    arrays = {name: getattr(sample, name) for name in _ARRAYS}
    return WireSample(
        arrays={name: (one.dtype.str, one.tobytes()) for name, one in arrays.items() if one is not None},
        metadata=json.dumps(sample.metadata, default=_tagged),
        **_as_they_are(sample),
    )


def from_wire(wire: WireSample) -> Sample:
    """A copy of the user's own; its arrays may be written to."""
    arrays: dict[str, Any] = {
        name: np.frombuffer(content, dtype=dtype).copy() for name, (dtype, content) in wire.arrays.items()
    }
    metadata = json.loads(wire.metadata, object_hook=_untagged)
    return Sample(**arrays, metadata=metadata, **_as_they_are(wire))


def _as_they_are(sample: Sample | WireSample) -> dict[str, Any]:
    """Fields that both have under one name and in one form."""
    return {name: getattr(sample, name) for name in WireSample.__struct_fields__ if name not in ("arrays", "metadata")}


def _tagged(value: object) -> object:
    if type(value) not in _SPECIAL:
        return str(value)
    return {_TAG: type(value).__name__, "value": _SPECIAL[type(value)][0](value)}


def _untagged(found: dict[str, Any]) -> Any:
    kind = _BY_NAME.get(found[_TAG]) if isinstance(found.get(_TAG), str) else None
    return found if kind is None else _SPECIAL[kind][1](found["value"])


async def next_body(reader: asyncio.StreamReader) -> bytes:
    """Raises EOFError at the end, ValueError for what is no message."""
    return await reader.readexactly(body_length(await reader.readexactly(HEADER_BYTES)))
