"""Whether a run goes on from what is saved, with the job as it is written by now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import structlog

from polyrl.errors import CannotGoOn, InvalidData, UserError
from polyrl.manifest.job import read_job
from polyrl.manifest.rules.resumption import changed_fields
from polyrl_trainer.checkpoints.seals import COMPLETE, replace_file
from polyrl_trainer.checkpoints.store import CheckpointStore
from polyrl_trainer.state import TrainingStage

log = structlog.get_logger(__name__)

BEGAN: Final = "began.json"
"""In a run's folder: the job that it began with."""


@contextmanager
def saved_stays(run: Path, store: str, learned: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Raises CannotGoOn for a fault of the input that ends a run of which something is saved, in its folder or in its
    `store`, as long as this process has not `learned` anything: another edit, and it goes on."""
    before = learned()
    try:
        yield
    except UserError as error:
        here = any((run / "checkpoints").glob(f"[!.]*/{COMPLETE}"))
        if learned() == before and (here or (store and CheckpointStore(store).complete())):
            raise CannotGoOn(str(error)) from error
        raise


def refuse_other_run(run: Path, job: Path, *, stage: TrainingStage | None) -> None:
    """Raises InvalidData naming a field that the run's checkpoints need as it was when the run began; `stage` is
    that of the newest one, None where there is none."""
    kept, now = run / BEGAN, read_job(job).spec
    try:
        began = now if stage is None else read_job(kept).spec
    except InvalidData as error:
        # Nobody could put it right: a power cut tore it, another version wrote it, or a run of before had none.
        log.warning("what the run began with cannot be read; it is what is written now", reason=str(error))
        began = now
    if began is now:
        replace_file(kept, job.read_bytes())
    for path, fault in changed_fields(began, now):
        raise InvalidData(f"spec.{'.'.join(path)}: {fault}")
    if stage is TrainingStage.RL and began.recipe.sft.steps != now.recipe.sft.steps:
        log.warning("recipe.sft.steps moves nothing: that stage is over", began_with=began.recipe.sft.steps)
