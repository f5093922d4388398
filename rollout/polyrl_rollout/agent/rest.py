"""Whether the engine holds memory of a device that the learner shares, and the manager's orders about it.

An engine that has not started yet is asleep: its start is its first waking. An order to sleep waits for a waking that
is under way, but no longer than its own deadline: of orders that came meanwhile only the last one counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class Sleeper:
    """Of one engine."""

    def __init__(self, able: bool, sleep: Callable[[float], Awaitable[None]], begin_waking: Callable[[], None]) -> None:
        """`sleep` gives memory back within so many seconds, or ends the agent; `begin_waking` begins to take it.
        `able`: the engine is worth it; one that is not is never asleep."""
        self.able = self.asleep = able
        self._sleep, self._begin_waking = sleep, begin_waking
        self.is_wanted = False
        """The last order was to wake."""
        self._deadline_s = 0.0
        self._ordered = asyncio.Event()

    def order_sleep(self, deadline_s: float) -> None:
        """GoToSleep."""
        self.is_wanted, self._deadline_s = False, deadline_s
        self._ordered.set()

    def order_wake(self) -> None:
        """WakeUp."""
        self.is_wanted = True
        self._ordered.set()

    async def run(self) -> None:
        """Follows orders until cancelled."""
        while True:
            await self._ordered.wait()
            self._ordered.clear()
            if not self.able:
                continue
            if not self.is_wanted:
                await self._sleep(self._deadline_s)
            elif self.asleep:
                self._begin_waking()
