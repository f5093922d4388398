"""Log lines as JSON on stderr, ours and kopf's alike. Refuses to hold: what is logged. Secrets never are."""

from __future__ import annotations

import logging
import sys
from typing import Any, Final

import structlog

LIBRARIES: Final = ("kopf", "aiohttp", "asyncio", "kubernetes")
"""Whose warnings are of interest, and nothing below."""


def configure(level: str) -> None:
    """`level`: debug, info, warning or error. Raises ValueError for another word."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"{level!r} is no log level; use debug, info, warning or error")
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
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=render))
    logging.basicConfig(level=number, handlers=[handler], force=True)
    for library in LIBRARIES:
        logging.getLogger(library).setLevel(max(number, logging.WARNING) if number > logging.DEBUG else number)
