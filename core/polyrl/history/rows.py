"""The trainer's rows, one for each step and each evaluation, as metrics.jsonl holds them and a manager is sent them."""

from __future__ import annotations

import io
from typing import Any, Final

import msgspec

from polyrl.errors import InvalidData, rows_of


class MetricsRow(msgspec.Struct, frozen=True):
    """One line of metrics.jsonl."""

    time: float
    """Unix seconds."""
    phase: str
    """sft, rl, offline-rl, dpo, reward-model or eval."""
    step: int
    values: dict[str, float]


LARGEST: Final = 1e15
"""Largest count, and most seconds; a file from elsewhere may hold numbers of any length."""

LARGEST_VALUE: Final = 1e250
"""Largest value that is drawn: sums and differences of many such values are still numbers."""

LONG_VALUE: Final = 1e6
"""From here on three decimals say nothing, and up to 250 digits before them fill a line."""

MAX_ROW_BYTES: Final = 1 << 20
"""Most bytes of a row, which has some hundred numbers: Python makes twenty times as much of the lists one may hold."""

MAX_METRIC_NUMBERS: Final = 20_000_000
"""Most numbers of a file: a hundred of each step for 200,000 steps, three gigabytes once they are read."""


def value_text(value: float) -> str:
    """Text of a value, with three decimals where that takes a few characters."""
    return f"{value:.3g}" if abs(value) >= LONG_VALUE else f"{value:.3f}"


def number(value: float) -> float:
    """At most LARGEST_VALUE, of either sign."""
    return float(max(-LARGEST_VALUE, min(value, LARGEST_VALUE)))


def parse_metrics(text: bytes) -> list[MetricsRow]:
    """Lines to rows; a line that is none is left out, for the file is the trainer's own log and not a protocol.

    Raises InvalidData when there are more rows, or numbers in them, than a run writes.
    """
    rows: list[MetricsRow] = []
    numbers = 0
    for row in rows_of(io.BytesIO(text), _row, "metrics.jsonl"):
        numbers += len(row.values)
        if numbers > MAX_METRIC_NUMBERS:
            raise InvalidData(
                f"metrics.jsonl: has more than {MAX_METRIC_NUMBERS:,} numbers, which are the most that are read"
            )
        rows.append(row)
    return rows


def _row(line: bytes) -> MetricsRow:
    if len(line) > MAX_ROW_BYTES:
        raise ValueError(f"a row of {len(line)} bytes is none")
    fields = msgspec.json.decode(line, type=dict[str, Any])
    values = {name: number(value) for name, value in fields.items() if isinstance(value, int | float)}
    time, step = values.pop("time"), int(values.pop("step"))
    if max(abs(time), abs(step)) > LARGEST:
        raise ValueError(f"time {time} or step {step} is none")
    return MetricsRow(time, str(fields["phase"]), step=step, values=values)
