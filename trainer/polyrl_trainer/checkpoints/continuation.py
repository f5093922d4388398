"""Whether a run goes on from what is saved, with the job as it is written by now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from polyrl.errors import CannotGoOn, InvalidData, UserError
from polyrl.manifest.job import read_job
from polyrl.manifest.rules.resumption import changed_fields
from polyrl_trainer.checkpoints.seals import COMPLETE, replace_file

BEGAN: Final = "began.json"
"""In a run's folder: the job that it began with."""


@contextmanager
def saved_stays(run: Path, learned: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Raises CannotGoOn for a fault of the input that ends a run of which something is saved, as long as this process
    has not `learned` anything: another edit, and it goes on."""
    before = learned()
    try:
        yield
    except UserError as error:
        if learned() == before and any((run / "checkpoints").glob(f"[!.]*/{COMPLETE}")):
            raise CannotGoOn(str(error)) from error
        raise


def refuse_other_run(run: Path, job: Path, *, begins: bool) -> None:
    """Raises InvalidData naming a field that the run's checkpoints need as it was when the run began."""
    kept = run / BEGAN
    if begins or not kept.exists():
        replace_file(kept, job.read_bytes())
    for path, fault in changed_fields(read_job(kept).spec, read_job(job).spec):
        raise InvalidData(f"spec.{'.'.join(path)}: {fault}")
