"""The trainer's rows, one for each step and each evaluation, as metrics.jsonl holds them and a manager is sent them."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from polyrl.errors import UNDECODABLE


class MetricsRow(msgspec.Struct, frozen=True):
    """One line of metrics.jsonl."""

    time: float
    """Unix seconds."""
    phase: str
    """sft, rl, offline-rl, dpo, reward-model or eval."""
    step: int
    values: dict[str, float]


LARGEST: Final = 1e15
"""Of counts and of seconds; a file from elsewhere may hold numbers of any length."""


def number(value: float) -> float:
    """Infinite where an integer is too large to be one."""
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value > 0 or -1)


def parse_metrics(text: bytes) -> list[MetricsRow]:
    """Lines to rows; a line that is none is left out, for the file is the trainer's own log and not a protocol."""
    rows = []
    for line in text.split(b"\n"):
        try:
            rows.append(_row(msgspec.json.decode(line, type=dict[str, Any])))
        except (*UNDECODABLE, KeyError, ValueError):
            continue
    return rows


def _row(fields: dict[str, Any]) -> MetricsRow:
    values = {name: number(value) for name, value in fields.items() if isinstance(value, int | float)}
    time, step = values.pop("time"), int(values.pop("step"))
    if max(abs(time), abs(step)) > LARGEST:
        raise ValueError(f"time {time} or step {step} is none")
    return MetricsRow(time, str(fields["phase"]), step=step, values=values)
