"""Frames that a socket dropped, counted, and logged at the first, second, fourth, eighth...: a flood fills no log."""

from __future__ import annotations

import structlog

log = structlog.get_logger(__name__)


class DroppedMessages:
    """Frames of one kind on one socket. Safe where one thread counts."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.count = 0

    def add(self, why: object) -> None:
        """One more."""
        self.count += 1
        if self.count & (self.count - 1) == 0:
            log.warning("dropped", what=self._what, count=self.count, why=str(why))
