"""`python -m polyrl_trainer.fetch`: ends with 0 when the model is there, and with a sentence and TEMPORARY_EXIT when it
cannot be had: a network comes back, a Secret is mended, and the job's `backoffLimit` counts the tries."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Final

import structlog
import typer

from polyrl.errors import InvalidData
from polyrl.manifest.environment import FETCHED
from polyrl.manifest.job import read_job
from polyrl.worker import TEMPORARY_EXIT
from polyrl_trainer.data.hub import fetch_model, is_fetched

log = structlog.get_logger()

PROGRESS_S: Final = 10.0
"""Between two lines of what has come."""


def main(
    job: Annotated[Path, typer.Option(help="The job, as JSON.")],
    manifest_dir: Annotated[Path, typer.Option(help="Folder that the manifest's relative paths start from.")],
) -> None:
    """Fetch the job's model."""
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    model = read_job(job).spec.recipe.model
    if not is_fetched(model, manifest_dir):
        log.info("nothing is to be fetched", path=model.path)
        return
    began, over = time.monotonic(), threading.Event()
    threading.Thread(target=_report, args=(Path(os.environ[FETCHED]), over), daemon=True).start()
    try:
        folder = fetch_model(model, manifest_dir)
    except InvalidData as error:
        print(error, file=sys.stderr)
        raise typer.Exit(TEMPORARY_EXIT) from None
    finally:
        over.set()
    log.info("fetched", path=model.path, folder=str(folder), seconds=round(time.monotonic() - began, 1))


def _report(cache: Path, over: threading.Event) -> None:
    while not over.wait(PROGRESS_S):
        size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file() and not path.is_symlink())
        log.info("fetching", bytes=size)


if __name__ == "__main__":
    typer.run(main)
