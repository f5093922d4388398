"""`python -m polyrl_trainer.fetch`: ends with 0 when model and rows are there, and with a sentence and TEMPORARY_EXIT
when one cannot be had: a network comes back, a Secret is mended, and the job's `backoffLimit` counts the tries."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import structlog
import typer

from polyrl.errors import DiskRefused, InvalidData
from polyrl.manifest.environment import FETCHED
from polyrl.manifest.job import read_job
from polyrl.manifest.parts.sources import Source, summed_up
from polyrl.status import MAX_NAME
from polyrl.wire import FetchReport
from polyrl.worker import TEMPORARY_EXIT
from polyrl_trainer.data.hub import fetch, is_fetched
from polyrl_trainer.fetch.expected import ExpectedFile, bytes_come, expected_files
from polyrl_trainer.fetch.to_manager import ToManager

log = structlog.get_logger()

PROGRESS_S: Final = 10.0
"""Between two lines of what has come."""

LAST_REPORT_S: Final = 5.0
"""For the report under way, so that the reason of a failure is the last line: a pod's status shows that one."""


def main(
    job: Annotated[Path, typer.Option(help="The job, as JSON.")],
    manifest_dir: Annotated[Path, typer.Option(help="Folder that the manifest's relative paths start from.")],
    manager_endpoints: Annotated[Path | None, typer.Option(help="Where the manager is, which gets reports.")] = None,
    keys: Annotated[Path | None, typer.Option(help="The trainer's key file, for reports.")] = None,
    pod: Annotated[str, typer.Option(help="Name of this pod.")] = "",
) -> None:
    """Fetch the job's model and rows."""
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    named = read_job(job).spec.recipe.sources
    sources = [one for one in named if is_fetched(one, manifest_dir)]
    if not sources:
        log.info("nothing is to be fetched", path=summed_up(named))
        return
    began, over = time.monotonic(), threading.Event()
    reports = None if manager_endpoints is None or keys is None else ToManager(manager_endpoints, keys)
    reporting = threading.Thread(target=_report, args=(sources, over, reports, pod), daemon=True)
    reporting.start()
    try:
        for one in sources:
            log.info("source fetched", path=one.path, at=str(fetch(one, manifest_dir)))
    except (InvalidData, DiskRefused) as error:
        over.set()
        reporting.join(LAST_REPORT_S)
        print(error, file=sys.stderr)
        raise typer.Exit(TEMPORARY_EXIT) from None
    over.set()
    log.info("fetched", path=summed_up(sources), seconds=round(time.monotonic() - began, 1))


def _report(sources: Sequence[Source], over: threading.Event, reports: ToManager | None, pod: str) -> None:
    """Says how much has come, now and every PROGRESS_S. Nothing of it can hold up or end the fetch."""
    files, place = _expected(sources), summed_up(sources)[:MAX_NAME]
    while True:
        fetched, total = (_cached_bytes(), 0) if files is None else bytes_come(files)
        log.info("fetching", bytes=fetched, of=total or None)
        if reports is not None:
            reports.report(FetchReport(pod[:MAX_NAME], place, fetched=fetched, total=total))
        if over.wait(PROGRESS_S):
            break
    if reports is not None:
        reports.close()


def _expected(sources: Sequence[Source]) -> list[ExpectedFile] | None:
    try:
        return [file for one in sources for file in expected_files(one)]
    except Exception as error:  # noqa: BLE001 - of any library; what fetches from there says what is wrong
        log.warning("how much there is to fetch is not known", reason=" ".join(str(error).split())[:MAX_NAME])
        return None


def _cached_bytes() -> int:
    files = (path for path in Path(os.environ[FETCHED]).rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)


if __name__ == "__main__":
    typer.run(main)
