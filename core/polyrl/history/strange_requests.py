"""A server's log that strangers cannot fill: requests that are none are counted, and nothing of them is quoted."""

from __future__ import annotations

import logging
from typing import Final

MALFORMED: Final = "aiohttp.http_exceptions"
"""Module of the errors that say that a request is none."""


class _Counted(logging.Filter):
    """Passes the first, second, fourth, eighth... record about malformed requests, each as a count of all so far."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        if kind is None or kind.__module__ != MALFORMED:
            return True
        self._count += 1
        record.msg, record.args = "requests that are none: %d, the newest a %s", (self._count, kind.__name__)
        record.exc_info = record.exc_text = None
        return self._count & (self._count - 1) == 0


def request_log(name: str) -> logging.Logger:
    """The log of one server."""
    made = logging.getLogger(name)
    if not any(isinstance(one, _Counted) for one in made.filters):
        made.addFilter(_Counted())
    return made
