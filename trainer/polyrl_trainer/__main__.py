"""`python -m polyrl_trainer`: parses the command line, then runs the trainer.

Logs are JSON lines on stderr. Ends with 0 when done or stopped on request, 1 when the run cannot go on, 2 on wrong
input, each failure with one sentence. Where another process takes its place it ends with HANDED_OVER_EXIT when that one
is to go on, or does so already, with CANNOT_GO_ON_EXIT when that one needs other input, and with TEMPORARY_EXIT when it
may succeed where this one did not; so it does anywhere when one of several ranks is lost.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import structlog
import typer

from polyrl import interpreter, parent_death_signal
from polyrl.errors import PASSING, CannotGoOn, GroupLeft, GroupLost, PolyRLError, Superseded, UserError
from polyrl.worker import CANNOT_GO_ON_EXIT, HANDED_OVER_EXIT, TEMPORARY_EXIT
from polyrl_trainer.client import MAX_MANAGER_OUTAGE_S

if TYPE_CHECKING:
    from polyrl_trainer.app import Arguments


def main(  # noqa: PLR0913 - one argument per flag
    job: Annotated[Path, typer.Option(help="The job, as JSON.")],
    manifest_dir: Annotated[Path, typer.Option(help="Folder that the manifest's relative paths start from.")],
    run: Annotated[Path, typer.Option(help="The run's folder.")],
    keys: Annotated[Path, typer.Option(help="The trainer's key file.")],
    run_epoch: Annotated[int, typer.Option("--epoch", help="The run epoch; the manager must be of the same.")],
    manager_endpoints: Annotated[Path | None, typer.Option(help="The manager's endpoints file.")] = None,
    resume: Annotated[Path | None, typer.Option(help="A run's folder or a checkpoint to go on from.")] = None,
    weights_port: Annotated[int, typer.Option(help="Where agents get weights; 0: the system chooses.")] = 0,
    advertise: Annotated[str, typer.Option(help="Host that agents on other machines reach this one by.")] = "",
    max_manager_outage: Annotated[float, typer.Option(help="Seconds without manager.")] = MAX_MANAGER_OUTAGE_S,
    grace: Annotated[float, typer.Option(help="Seconds to finish a step and save in, once asked to stop.")] = 15.0,
    hand_over: Annotated[bool, typer.Option("--hand-over", help="Leave a run open that another goes on with.")] = False,
    store: Annotated[str, typer.Option(help="URI where checkpoints are kept beside the run's folder.")] = "",
    pod: Annotated[int, typer.Option(help="Which one of several pods of the trainer this is, from 0.")] = 0,
    pods_at: Annotated[str, typer.Option(help="HOST:PORT by which other pods find the first; none: no others.")] = "",
) -> None:
    """Learn until the recipe is done."""
    parent_death_signal.hold()
    _log_json()
    if isinstance(sys.stdout, TextIOWrapper):
        # User code prints in many threads; unbuffered, a line and its end are two writes, between which others come.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    if hand_over:
        # The first process of a container is deaf to signals without a handler; the loop brings its own.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(HANDED_OVER_EXIT))
    with interpreter.loading():
        from polyrl_trainer.app import Arguments
        from polyrl_trainer.sinks.delivery import any_abandoned

    arguments = Arguments(
        job=job,
        manifest_dir=manifest_dir,
        run=run,
        keys=keys,
        run_epoch=run_epoch,
        manager_endpoints=manager_endpoints,
        resume=resume,
        weights_port=weights_port,
        advertise=advertise,
        max_manager_outage_s=max_manager_outage,
        grace_s=grace,
        hand_over=hand_over,
        store=store,
        pod=pod,
        pods_at=_address(pods_at),
    )
    code = _exit_code(arguments)
    # What user code printed goes nowhere where nobody reads it, and how the run ended stays how it ended.
    interpreter.flushed()
    if any_abandoned():
        # Its library's exit handlers would wait for the service that was not waited for.
        os._exit(code)
    raise typer.Exit(code)


def _exit_code(arguments: Arguments) -> int:
    """Exit code of a run, whose error is printed."""
    try:
        return _run(arguments)
    except PolyRLError as error:
        print(error, file=sys.stderr, flush=True)
        return exit_code_of(error, arguments.hand_over)
    except Exception:  # noqa: BLE001 - printed whole
        traceback.print_exc()
        return TEMPORARY_EXIT if arguments.hand_over else 1


def _run(arguments: Arguments) -> int:
    """The exit status of an end without an error."""
    from polyrl_trainer.app import run_other_pod, run_trainer

    if arguments.pod > 0:
        return asyncio.run(run_other_pod(arguments))
    done = asyncio.run(run_trainer(arguments))
    return HANDED_OVER_EXIT if arguments.hand_over and not done else 0


def exit_code_of(error: PolyRLError, hand_over: bool) -> int:
    """The exit status for this error, for whoever may start another process."""
    if isinstance(error, GroupLeft) or (hand_over and isinstance(error, Superseded)):
        return HANDED_OVER_EXIT
    if isinstance(error, GroupLost) or (hand_over and isinstance(error, PASSING)):
        return TEMPORARY_EXIT
    if hand_over and isinstance(error, CannotGoOn):
        return CANNOT_GO_ON_EXIT
    return 2 if isinstance(error, UserError) else 1


def _address(text: str) -> tuple[str, int] | None:
    host, _, port = text.rpartition(":")
    return (host, int(port)) if host else None


def _log_json() -> None:
    steps = structlog.processors
    structlog.configure(
        [steps.add_log_level, steps.TimeStamper(fmt="iso", utc=True), steps.format_exc_info, steps.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


if __name__ == "__main__":
    with interpreter.prompt_exit():
        typer.run(main)
