"""What a check of the user's rows, model and code reports, one JSON line each: written in a process of the trainer's
package, where user code may run, and read by the command line, where it may not."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec

CheckedField: TypeAlias = tuple[str | int, ...]
"""Path of a manifest's field."""


RESPONSE_FLAG: Final[CheckedField] = ("--response",)
"""Stands for a field where what is wrong was given on the command line."""


class CheckPart(StrEnum):
    """Parts that are checked beside each other, each in a process of its own."""

    DATA = "data"
    """The tokenizer, every row, and the model's size of vocabulary."""
    MODEL = "model"
    """The fields of `recipe.model.config`, by transformers."""
    CODE = "code"
    """Reward, filter and environment: imported, their signatures read, the reward called on one row."""
    REWARD = "reward"
    """The reward alone, on a row and a response of the user's choice."""


class CheckBegan(msgspec.Struct, frozen=True, tag="began"):
    """From here on, `what` is under way; a deadline that ends the process names it."""

    field: CheckedField
    what: str


class CheckFault(msgspec.Struct, frozen=True, tag="fault"):
    """One thing that is wrong."""

    field: CheckedField
    sentence: str


class CheckSkipped(msgspec.Struct, frozen=True, tag="skipped"):
    """A check that could not be made, because a module is not installed here."""

    what: str
    module: str


class CheckUnmade(msgspec.Struct, frozen=True, tag="unmade"):
    """A check that could not be made here, for another reason."""

    sentence: str


class CheckNote(msgspec.Struct, frozen=True, tag="note"):
    """What is no fault, and what a user may not have meant."""

    sentence: str


class RewardTried(msgspec.Struct, frozen=True, tag="tried", kw_only=True):
    """The reward function's answer for one row."""

    place: str
    """`FILE:LINE` of the row."""
    prompt: str
    response: str
    seconds: float
    reward: float | None = None
    """None: it gave no reward, and `refusal` says why."""
    metrics: dict[str, float] = {}
    refusal: str = ""


class CheckEnded(msgspec.Struct, frozen=True, tag="ended"):
    """Everything was looked at."""


CheckMessage: TypeAlias = CheckBegan | CheckFault | CheckSkipped | CheckUnmade | CheckNote | RewardTried | CheckEnded

_DECODER = msgspec.json.Decoder(CheckMessage)


def encode_check(message: CheckMessage) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def decode_checks(lines: bytes) -> Iterator[CheckMessage]:
    """The whole lines of what a process wrote; it may have been killed within its last one."""
    for line in lines.splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield _DECODER.decode(line)
