"""`polyrl`: the command line. What each command takes and does stands in `commands`.

Exit status: 0 done, 1 the run failed, 2 the user's input is wrong (one line per fault, no traceback), 130 interrupted.
Any other exception is a bug in PolyRL and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from polyrl import interpreter
from polyrl_cli.commands import faults, job, model, observe
from polyrl_cli.commands.options import RUN_FAILED, echo

USER_ERROR: Final = 2
INTERRUPTED: Final = 130
"""128 + SIGINT, as shells report it."""
DISK_REFUSES: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, a quota, a limit of a file's size."""


class _Commands(TyperGroup):
    """Turns the errors that PolyRL raises on purpose into sentences and exit statuses."""

    def invoke(self, ctx: Any) -> Any:
        from polyrl.errors import PolyRLError, UserError

        try:
            return super().invoke(ctx)
        except PolyRLError as error:
            echo(str(error), err=True)
            raise typer.Exit(USER_ERROR if isinstance(error, UserError) else RUN_FAILED) from None
        except ModuleNotFoundError as error:
            from polyrl_cli.extras import EXTRA_OF, missing_packages

            module = (error.name or "").partition(".")[0]
            if module not in EXTRA_OF:
                raise
            command = f"polyrl {ctx.invoked_subcommand}"
            echo(missing_packages(command, [module], EXTRA_OF[module]), err=True)
            raise typer.Exit(USER_ERROR) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    # Rich help costs 0.2 s of import for a table.
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Reinforcement learning of language models on a few reserved trainers and many preemptible rollouts."""


COMMANDS: Final[dict[str, Callable[..., None]]] = {
    "init": job.init,
    "validate": job.validate,
    "plan": job.gpu_plan,
    "reward": job.reward,
    "run": job.run,
    "resume": job.resume,
    "status": observe.status,
    "logs": observe.logs,
    "top": observe.top,
    "ls": observe.list_of_runs,
    "compare": observe.compare,
    "samples": observe.kept_samples,
    "why": observe.why,
    "explain": observe.explain,
    "report": observe.report,
    "check": observe.check,
    "export": model.export,
    "get": model.get,
    "generate": model.generate,
    "chaos": faults.chaos,
    "crd": job.crd,
}
"""In the order of the help."""
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    echo(f"polyrl {installed('polyrl')}")


def main() -> None:
    """Entry point of the `polyrl` command."""
    _take_streams()
    with interpreter.prompt_exit():
        try:
            app()
        except OSError as error:
            if error.errno not in DISK_REFUSES or error.filename is not None:
                raise
            interpreter.unwritten(error)
            raise SystemExit(RUN_FAILED) from None


def _take_streams() -> None:
    """Makes stdout and stderr safe to print to: what a terminal's encoding lacks is escaped, and a stream that the
    caller has closed leads nowhere, lest a file opened later gets its number and our output."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - as long as the process
        else:
            with suppress(OSError):  # of a stream that cannot say where it stands; it is done by then
                stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
