"""Metrics to files: JSON lines always, TensorBoard events when asked for. Names follow the field's
(`actor/pg_loss`...).

Refuses to hold: what is measured (see `rl_metrics`, the loops), where status shows it (see `session`). Read next:
`metrics_history`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

METRICS: Final = "metrics.jsonl"
"""File of a run's folder."""


class MetricsLogger(Protocol):
    """One sink."""

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Named numbers of one step of `phase` (sft, rl, offline-rl, eval)."""
        ...

    def close(self) -> None:
        """Nothing is logged after it."""
        ...


class JSONLLogger:
    """Appends one object per call, readable by others at once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        # JSON has no NaN; a number that is none is left out rather than making the line unreadable.
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        line = {"time": round(time.time(), 3), "phase": phase, "step": step, **finite}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardLogger:
    """Scalars as events, tagged `phase/name`."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{phase}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class MetricsLoggers:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[MetricsLogger]) -> None:
        self._sinks = sinks

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.log(phase, step, values)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def open_metrics(run: Path, tensorboard: bool) -> MetricsLogger:
    """RUN/metrics.jsonl, and RUN/tensorboard/ when asked for."""
    sinks: list[MetricsLogger] = [JSONLLogger(run / METRICS)]
    if tensorboard:
        sinks.append(TensorBoardLogger(run / "tensorboard"))
    return MetricsLoggers(sinks)
