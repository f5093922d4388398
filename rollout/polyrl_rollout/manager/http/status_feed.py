"""Tells watchers of the status that something changed, at most a few times per second.

Refuses to hold: the status itself. Read next: `http_api`.
"""

from __future__ import annotations

import asyncio
from typing import Final

MIN_INTERVAL_S: Final = 0.2
"""Shortest time between two changes that watchers see; people and controllers need no more."""


class StatusFeed:
    """A number that grows with changes, and a way to wait for it."""

    def __init__(self) -> None:
        self.seq = 0
        self._loop = asyncio.get_running_loop()
        self._planned: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    def note_change(self) -> None:
        """Something changed; watchers learn it within MIN_INTERVAL_S."""
        if self._planned is None:
            self._planned = self._loop.call_later(MIN_INTERVAL_S, self.publish)

    def publish(self) -> None:
        """Lets watchers go on now."""
        if self._planned is not None:
            self._planned.cancel()
            self._planned = None
        self.seq += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_beyond(self, since: int, timeout_s: float) -> None:
        """Returns when `seq` > since, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.seq <= since:
                    await self._changed.wait()
        except TimeoutError:
            return
