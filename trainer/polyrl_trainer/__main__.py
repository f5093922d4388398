"""`python -m polyrl_trainer`: parses the command line, then runs the trainer.

Logs are JSON lines on stderr. Ends with 0 when done or stopped on request, 1 when the run cannot go on, 2 on wrong
input, each failure with one sentence. Refuses to import torch before the arguments are known to be right. Read
next: `app`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import structlog
import typer

from polyrl import leash
from polyrl.errors import PolyRLError, UserError


def main(
    job: Annotated[Path, typer.Option(help="The job, as JSON.")],
    manifest_dir: Annotated[Path, typer.Option(help="Folder that the manifest's relative paths start from.")],
    run: Annotated[Path, typer.Option(help="The run's folder.")],
    keys: Annotated[Path, typer.Option(help="The trainer's key file.")],
    epoch: Annotated[int, typer.Option(help="Start of the run; the manager must be of the same.")],
    manager_endpoints: Annotated[Path | None, typer.Option(help="The manager's endpoints file.")] = None,
    resume: Annotated[Path | None, typer.Option(help="A run's folder or a checkpoint to go on from.")] = None,
) -> None:
    """Learn until the recipe is done."""
    leash.hold()
    _log_json()
    from polyrl_trainer.app import Arguments, run_trainer

    try:
        asyncio.run(run_trainer(Arguments(job, manifest_dir, run, keys, epoch, manager_endpoints, resume)))
    except PolyRLError as error:
        print(error, file=sys.stderr, flush=True)
        raise typer.Exit(2 if isinstance(error, UserError) else 1) from None


def _log_json() -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


if __name__ == "__main__":
    typer.run(main)
