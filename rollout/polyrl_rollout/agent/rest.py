"""Whether the engine holds memory of a device that the learner shares, and the manager's orders about it.

An engine that has not started yet is asleep: its start is its first waking. An order to sleep waits for a waking that
is under way, but no longer than its own deadline: of orders that came meanwhile only the last one counts.

A Welcome takes an order to wake back; a manager that still wants it orders it again after the Welcome. Otherwise an
agent that was frozen until its lease ended, and reads the order only then, wakes beside the learner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from polyrl.wire import GoToSleep, WakeUp


class RestOrders:
    """What one engine is to do next, by its orders. This knows no clock and calls nobody."""

    def __init__(self, able: bool) -> None:
        self.able = self.asleep = able
        """The engine takes orders; it holds nothing of its device."""
        self.is_wanted = False
        """The last order was to wake, and no greeting took it back."""
        self._next: GoToSleep | WakeUp | None = None

    def order(self, order: GoToSleep | WakeUp) -> None:
        """The order came."""
        self._next, self.is_wanted = order, isinstance(order, WakeUp)

    def welcomed(self) -> None:
        """The manager has answered a greeting."""
        self.is_wanted = False
        if isinstance(self._next, WakeUp):
            self._next = None

    def take(self) -> GoToSleep | WakeUp | None:
        """The order to follow now."""
        order, self._next = self._next, None
        return order if self.able else None


class Sleeper:
    """Follows the orders with an engine."""

    def __init__(
        self,
        orders: RestOrders,
        *,
        sleep: Callable[[GoToSleep], Awaitable[None]],
        begin_waking: Callable[[], None],
        confirm_awake: Callable[[], None],
    ) -> None:
        """`sleep` gives memory back by the order's deadline, or ends the agent; `begin_waking` begins to take it;
        `confirm_awake` answers an order to wake of one that is awake."""
        self._orders, self._sleep = orders, sleep
        self._begin_waking, self._confirm_awake = begin_waking, confirm_awake
        self._ordered = asyncio.Event()

    def order(self, order: GoToSleep | WakeUp) -> None:
        """The order came."""
        self._orders.order(order)
        self._ordered.set()

    async def run(self) -> None:
        """Follows orders until cancelled."""
        while True:
            await self._ordered.wait()
            self._ordered.clear()
            match self._orders.take():
                case GoToSleep() as order:
                    await self._sleep(order)
                case WakeUp() if self._orders.asleep:
                    self._begin_waking()
                case WakeUp():
                    self._confirm_awake()
