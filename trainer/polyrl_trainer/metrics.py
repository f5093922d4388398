"""Metrics to files: JSON lines always, TensorBoard events when asked for; and the way back to a checkpoint.

Names follow the field's (`actor/pg_loss`...). A trainer that goes on from a checkpoint runs and writes later steps
again, so their rows are dropped first, and with them any row that its writer was killed over. Rows are in the order
of writing, so all from the first step beyond the checkpoint on is dropped. An evaluation that ends a stage comes after
that stage's last checkpoint, and is repeated; all others belong to the step before them.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from polyrl.sample_record import Chosen, SampleRecord
from polyrl_trainer.checkpoints import replace_file
from polyrl_trainer.state import TrainerState, TrainingStage

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS: Final = "metrics.jsonl"
"""File of a run's folder."""

SHOWN_SAMPLES: Final = 4
"""Of one step or one evaluation in TensorBoard; samples.jsonl has more."""
SHOWN_CHARS: Final = 1000
"""Of a text there."""
TEXTS_BETWEEN_HALVINGS: Final = 100
"""Steps shown in a row; then every second one, then every fourth: event files only grow, and a page shows ten."""


class MetricsLogger:
    """RUN/metrics.jsonl, one object per call, readable by others at once; and RUN/tensorboard/ when asked for."""

    def __init__(self, run: Path, *, tensorboard: bool = False) -> None:
        run.mkdir(parents=True, exist_ok=True)
        self._file = (run / METRICS).open("a", encoding="utf-8")
        self._events: SummaryWriter | None = None
        self._offered: Counter[str] = Counter()
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(run / "tensorboard"))

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Named numbers of one step of `phase` (sft, rl, offline-rl, eval)."""
        # JSON has no NaN; a number that is none is left out rather than making the line unreadable.
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        line = {"time": round(time.time(), 3), "phase": phase, "step": step, **finite}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(f"{phase}/{name}", value, step)

    def log_samples(self, records: Sequence[SampleRecord]) -> None:
        """Texts of one step or one evaluation; TensorBoard alone shows them."""
        if self._events is None or not records:
            return
        purpose, _, step = records[0].moment
        self._offered[purpose] += 1
        if self._offered[purpose] % sparsity(self._offered[purpose]) == 0:
            extremes_first = sorted(records, key=lambda record: record.chosen[:1] in ((), (Chosen.RANDOM,)))
            self._events.add_text(f"samples/{purpose}", markdown(extremes_first[:SHOWN_SAMPLES]), step)

    def close(self) -> None:
        """Nothing is logged after it."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def sparsity(offered: int) -> int:
    """Every how manieth text is shown by now."""
    return 1 << (offered // TEXTS_BETWEEN_HALVINGS).bit_length()


def markdown(records: Sequence[SampleRecord]) -> str:
    """Samples as TensorBoard's page renders them; texts stand in indented blocks, in which nothing is markup."""
    return "\n\n".join(
        f"**{one.sample}** reward {one.reward:g}, {one.finish}\n\n{_block(one.prompt)}\n\n---\n\n{_block(one.response)}"
        for one in records
    )


def _block(text: str) -> str:
    shown = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]} […]"
    return "\n".join(f"    {line}" for line in shown.splitlines()) or "    "


ORDER: Final = tuple(stage.value for stage in TrainingStage)
"""Stages in the order in which a run goes through those that it has."""


def rewind_metrics(path: Path, state: TrainerState) -> None:
    """Leaves in the file what had happened by `state`; another file takes its place at once, or none does."""
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")[:-1]
    kept = list(kept_rows(lines, state))
    replace_file(path, b"".join(line + b"\n" for line in kept))


def kept_rows(lines: Iterable[bytes], state: TrainerState) -> Iterator[bytes]:
    """The lines that `state` has behind it, in order; none that is no row."""
    reached = (ORDER.index(state.stage.value), state.step)
    at_end = state.step == 0
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


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and {"phase", "step"} <= row.keys() else None
