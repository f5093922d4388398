"""What stays of metrics.jsonl when a trainer goes on from a checkpoint: the rows of the moment that it goes back to.

Steps after that moment are run again and written again; without this they would be in the file twice, and a row that
its writer was killed over would be glued to the next one. Rows are in the order in which they were written, so all from
the first step beyond the checkpoint on is dropped. An evaluation that ends a stage comes after that stage's last
checkpoint, and is repeated; all others belong to the step before them.

Refuses to hold: writing rows (see `metrics`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from polyrl_trainer.state import TrainerState, TrainingStage

ORDER: Final = tuple(stage.value for stage in TrainingStage)
"""Stages in the order in which a run goes through those that it has."""


def go_back_to(path: Path, state: TrainerState) -> None:
    """Leaves in the file what had happened by `state`; another file takes its place at once, or none does."""
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")[:-1]
    kept = list(kept_rows(lines, state))
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_bytes(b"".join(line + b"\n" for line in kept))
    unfinished.replace(path)


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
