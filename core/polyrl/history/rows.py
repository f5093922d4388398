"""The trainer's rows, one for each step and each evaluation, as metrics.jsonl holds them and a manager is sent them."""

from __future__ import annotations

from typing import Any

import msgspec

from polyrl.errors import UNDECODABLE


class MetricsRow(msgspec.Struct, frozen=True):
    """One line of metrics.jsonl."""

    time: float
    """Unix seconds."""
    phase: str
    """sft, rl, offline-rl or eval."""
    step: int
    values: dict[str, float]


def parse_metrics(text: bytes) -> list[MetricsRow]:
    """Lines to rows; a line that is none is left out, for the file is the trainer's own log and not a protocol."""
    rows = []
    for line in text.split(b"\n"):
        try:
            rows.append(_row(msgspec.json.decode(line, type=dict[str, Any])))
        except (*UNDECODABLE, KeyError):
            continue
    return rows


def _row(fields: dict[str, Any]) -> MetricsRow:
    values = {name: float(value) for name, value in fields.items() if isinstance(value, int | float)}
    time, step = values.pop("time"), int(values.pop("step"))
    return MetricsRow(time, str(fields["phase"]), step=step, values=values)
