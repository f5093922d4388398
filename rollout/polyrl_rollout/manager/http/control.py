"""The control service behind the HTTP API: what it shows of the ledger, and the one thing it may ask of it, a drain."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from polyrl.control import DrainAnswer, DrainRequest, Health, Waits
from polyrl.ledger import Effects, Ledger
from polyrl.status import ManagerStatus

FINAL_STATUS_S: Final = 3.0
"""Longest time the final status waits for somebody to read it, once all agents are gone."""
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
        """Something changed; watchers see it within MIN_INTERVAL_S."""
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


class ManagerCore(Protocol):
    """What the control service needs of the manager."""

    def now(self) -> float: ...  # the ledger's clock

    def deliver_and_settle(self, effects: Effects) -> None: ...

    def complete(self, status: ManagerStatus) -> ManagerStatus:
        """Adds what the ledger does not know: connections, bytes."""
        ...


class ControlService:
    """Status, waits and drains of one running manager."""

    def __init__(self, ledger: Ledger, run_epoch: int, manager: ManagerCore) -> None:
        self.feed = StatusFeed()
        self._ledger, self._run_epoch, self._manager = ledger, run_epoch, manager
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._final_read = asyncio.Event()

    def status(self) -> ManagerStatus:
        """The whole run now."""
        return self._manager.complete(self._ledger.status(self._manager.now(), self.feed.seq))

    async def watch_status(self, since: int, timeout_s: float) -> ManagerStatus:
        """The status, once it is newer than `since` or `timeout_s` is over."""
        await self.feed.wait_beyond(since, timeout_s)
        status = self.status()
        if status.finished:
            self._final_read.set()
        return status

    def waits(self) -> Waits:
        """Who waits for whom."""
        now = self._manager.now()
        return Waits(waits=tuple(wait.sentence(now) for wait in self._ledger.waits(now)))

    def drain(self, request: DrainRequest) -> DrainAnswer:
        """Drains an engine; again is harmless."""
        known = any(engine.engine == request.engine for engine in self.status().engines)
        if known:
            now, seconds = self._manager.now(), request.deadline_seconds
            self._manager.deliver_and_settle(self._ledger.drain(request.engine, seconds, request.reason, now))
        return DrainAnswer(engine=request.engine, known=known)

    def health(self) -> Health:
        """Written by the live loop."""
        return Health(run_epoch=self._run_epoch, uptime_seconds=self._loop.time() - self._started)

    async def await_departures(self, deadline_s: float) -> bool:
        """Waits until all engines are gone and the final status was read; False when `deadline_s` came first."""
        self.feed.publish()
        try:
            async with asyncio.timeout(deadline_s):
                while self.status().engines:
                    await self.feed.wait_beyond(self.feed.seq, deadline_s)
                async with asyncio.timeout(FINAL_STATUS_S):
                    await self._final_read.wait()
        except TimeoutError:
            return False
        return True
