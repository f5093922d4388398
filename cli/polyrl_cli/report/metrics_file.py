"""Rows of metrics.jsonl, which the trainer writes: all of them, or those that come."""

from __future__ import annotations

import os
from pathlib import Path
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


class MetricsTail:
    """Follows a metrics.jsonl that another process appends to, from its present end.

    A trainer that goes back to a checkpoint puts another file in its place, with the rows that still hold: rows older
    than the newest one returned are not returned again.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._inode, self._offset = (file.stat().st_ino, file.stat().st_size) if file.exists() else (0, 0)
        self._newest = max((row.time for row in read_metrics(file)), default=0.0)

    def read(self) -> list[MetricsRow]:
        """Every line that was finished since the last call."""
        if not self._file.exists():
            return []
        with self._file.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            replaced, self._inode = inode != self._inode, inode
            file.seek(0 if replaced else self._offset)
            whole, _, _ = file.read().rpartition(b"\n")
        self._offset = (0 if replaced else self._offset) + (len(whole) + 1 if whole else 0)
        rows = [row for row in parse_metrics(whole) if not replaced or row.time > self._newest]
        self._newest = max([self._newest, *(row.time for row in rows)])
        return rows


def read_metrics(file: Path) -> list[MetricsRow]:
    """All whole lines; none when there is no file."""
    return parse_metrics(file.read_bytes().rpartition(b"\n")[0]) if file.exists() else []


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
    return MetricsRow(time, str(fields["phase"]), step, values)
