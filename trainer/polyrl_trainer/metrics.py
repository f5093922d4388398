"""Metrics to metrics.jsonl and to the sinks that the manifest chooses; and the way back to a checkpoint.

Names follow the field's (`actor/pg_loss`...). A trainer that goes on from a checkpoint runs and writes later steps
again, so their rows are dropped first, and with them any row that its writer was killed over. Rows are in the order
of writing, so all from the first step beyond the checkpoint on is dropped. An evaluation that ends a stage comes after
that stage's last checkpoint, and is repeated; all others belong to the step before them.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from polyrl.sample_record import SampleRecord
from polyrl_trainer.checkpoints import append, replace_file, writing
from polyrl_trainer.sinks.delivery import DELIVERY_DEADLINE_S, QUEUE_ENTRIES, STOPPED_DEADLINE_S, Delivery, SinkReport
from polyrl_trainer.sinks.port import MetricRow, Texts, by_path
from polyrl_trainer.state import TrainerState, TrainingStage

METRICS: Final = "metrics.jsonl"
"""File of a run's folder."""

EARLIER_ROWS: Final = QUEUE_ENTRIES // 2
"""Newest rows of an earlier process that sinks are offered again; half of what a sink's queue holds."""
TEXTS_BETWEEN_HALVINGS: Final = 100
"""Steps shown in a row; then every second one, then every fourth: event files only grow, and a page shows ten."""


class MetricsLogger:
    """RUN/metrics.jsonl, one object per call, readable by others at once; and the sinks."""

    def __init__(self, run: Path, sinks: Sequence[Delivery] = ()) -> None:
        run.mkdir(parents=True, exist_ok=True)
        if sinks:
            for row in earlier_rows(run / METRICS):
                for sink in sinks:
                    sink.offer(row)
        self.newest = newest_moment(run / METRICS)
        """Phase and step of the newest row, of an earlier process too; None before the first."""
        self._path = run / METRICS
        with writing(self._path):
            self._file = self._path.open("ab", buffering=0)
        self._sinks = sinks
        self._offered: Counter[str] = Counter()

    def log(self, phase: str, step: int, values: Mapping[str, float], *, before: int = 0) -> None:
        """Named numbers of one step of `phase` (sft, rl, offline-rl, eval), which `before` steps of other stages came
        before."""
        # JSON has no NaN; a number that is none is left out rather than making the line unreadable.
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        now = round(time.time(), 3)
        row = json.dumps({"time": now, "phase": phase, "step": step, **finite}) + "\n"
        append(self._file, self._path, row.encode())
        self.newest = phase, step
        for sink in self._sinks:
            sink.offer(MetricRow(phase, before + step, time=now, values=dict(values)))

    def log_samples(self, records: Sequence[SampleRecord], *, before: int = 0) -> None:
        """Texts of one step or one evaluation, which only sinks get from here."""
        if not records:
            return
        purpose, _, step = records[0].moment
        self._offered[purpose] += 1
        if self._offered[purpose] % sparsity(self._offered[purpose]) == 0:
            for sink in self._sinks:
                sink.offer(Texts(purpose, before + step, records=records))

    def close(self, outcome: str = "", results: Mapping[str, Any] = MappingProxyType({})) -> dict[str, SinkReport]:
        """Nothing is logged after it. Ends the sinks' runs with `outcome` and `results`, within a deadline that holds
        for all together; gives what became of each."""
        self._file.close()
        deadline = time.monotonic() + (STOPPED_DEADLINE_S if outcome == "stopped" else DELIVERY_DEADLINE_S)
        for sink in self._sinks:
            sink.end(outcome, by_path(results, "/"))
        return {sink.name: sink.finish(deadline) for sink in self._sinks}


def sparsity(offered: int) -> int:
    """Every how manieth text is shown by now."""
    return 1 << (offered // TEXTS_BETWEEN_HALVINGS).bit_length()


ORDER: Final = tuple(stage.value for stage in TrainingStage)
"""Stages in the order in which a run goes through those that it has."""


def rewind_metrics(path: Path, state: TrainerState) -> None:
    """Leaves in the file what had happened by `state`; another file takes its place at once, or none does."""
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")[:-1]
    replace_file(path, b"".join(line + b"\n" for line in kept_rows(lines, state)))


def kept_rows(lines: Iterable[bytes], state: TrainerState) -> Iterator[bytes]:
    """The lines that `state` has behind it, in order; none that is no row."""
    reached = (ORDER.index(state.stage.value), state.step)
    at_end = state.step == 0 and "base" not in state.results.evaluations
    for line in lines:
        row = _row(line)
        if row is None:
            continue
        if row["phase"] in ORDER:
            moment = (ORDER.index(row["phase"]), row["step"])
            if moment > reached:
                return
            at_end = moment == reached and state.stage_done
        elif at_end:
            continue
        yield line


def earlier_rows(path: Path) -> list[MetricRow]:
    """The newest rows that the file holds, for sinks that lack some of them: those that took rows and were killed with
    this run's last process, and those that were away."""
    done: Counter[str] = Counter()
    rows = deque[MetricRow](maxlen=EARLIER_ROWS)
    stage = ""
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        row = _row(line)
        if row is None:
            continue
        phase, step, at = row.pop("phase"), row.pop("step"), row.pop("time", 0.0)
        if phase in ORDER:
            stage, done[phase] = phase, step
        # What is evaluated before a stage's first step has all earlier stages behind it.
        before = done.total() - (0 if step == 0 else done[stage])
        rows.append(MetricRow(phase, before + step, time=at, values=row))
    return list(rows)


def newest_moment(path: Path) -> tuple[str, int] | None:
    """Phase and step of the file's newest row."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    found = next((row for line in reversed(lines) if (row := _row(line)) is not None), None)
    return None if found is None else (found["phase"], found["step"])


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and {"phase", "step"} <= row.keys() else None
