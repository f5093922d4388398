"""`python -m polyrl_operator`: the operator; `Options` are its flags.

Exit status: 0 asked to end, 1 failed (it is to be restarted), 2 a flag is wrong.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import sys
from typing import Any, Final

import structlog
import typer

from polyrl.errors import UserError
from polyrl.keys import leave_no_core_dump
from polyrl_operator.app import Options, run_operator

log = structlog.get_logger(__name__)

FAILED: Final = 1
USER_ERROR: Final = 2

GC_THRESHOLD: Final = 5_000
"""Objects made before the collector looks at them, 700 by default: one answer of the API server has hundreds."""

NO_FLAGS: Final = ("identity", "terms")
"""Options that nobody sets by hand."""

LIBRARIES: Final = ("kopf", "aiohttp", "asyncio", "kubernetes")
"""Whose warnings are logged, and nothing below."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def main(**flags: Any) -> None:
    """Runs PolyRLJobs as pods until it is asked to end."""
    options = Options(**flags)
    if options.all_namespaces == bool(options.namespace):
        raise typer.BadParameter("give either --namespace, once or more, or --all-namespaces")
    configure_logs(options.log_level)
    leave_no_core_dump()
    # Spares the collector. What was loaded stays for good, and need not be looked through again with every few thousand
    # objects that events and answers are read into; these hold no cycles, and go without it.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    try:
        asyncio.run(run_operator(options))
    except UserError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(USER_ERROR) from None
    except Exception:
        log.exception("the operator cannot go on, and is to be restarted")
        raise typer.Exit(FAILED) from None


def configure_logs(level: str) -> None:
    """Log lines as JSON on stderr, ours and the libraries' alike."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        message = f"{level!r} is no log level; use debug, info, warning or error"
        raise typer.BadParameter(message, param_hint="--log-level")
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    render: list[Any] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=render))
    logging.basicConfig(level=number, handlers=[handler], force=True)
    for library in LIBRARIES:
        logging.getLogger(library).setLevel(max(number, logging.WARNING) if number > logging.DEBUG else number)


# The fields of Options are the flags: declared once.
_parameters = inspect.signature(Options, eval_str=True).parameters.values()
_flags = [one.replace(kind=one.KEYWORD_ONLY) for one in _parameters if one.name not in NO_FLAGS]
vars(main)["__signature__"] = inspect.Signature(_flags)
app.command(context_settings={"auto_envvar_prefix": "POLYRL"})(main)

if __name__ == "__main__":
    app()
