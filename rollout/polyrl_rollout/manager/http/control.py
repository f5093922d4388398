"""The operator's side of the manager: what the HTTP API shows of the ledger, and the one thing it may ask of it.

Refuses to hold: HTTP (see `http_api`), rules. Read next: `status_feed`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from polyrl.control import DrainAnswer, DrainRequest, Health, Waits
from polyrl.ledger import Effects, Ledger
from polyrl.status import ManagerStatus
from polyrl_rollout.manager.http.status_feed import StatusFeed
from polyrl_rollout.manager.http.status_view import view_of

FINAL_STATUS_S: Final = 3.0
"""Longest time the final status waits for somebody to read it, once all agents are gone."""


class ControlDesk:
    """Between the HTTP API and the ledger."""

    def __init__(
        self,
        ledger: Ledger,
        run_epoch: int,
        deliver: Callable[[Effects], None],
        complete: Callable[[ManagerStatus], ManagerStatus],
        now: Callable[[], float],
    ) -> None:
        """`complete` adds to a status what only the shell knows; `now` is the ledger's clock."""
        self.feed = StatusFeed()
        self._ledger = ledger
        self._run_epoch = run_epoch
        self._deliver = deliver
        self._complete = complete
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._final_read = asyncio.Event()

    def status(self) -> ManagerStatus:
        """The whole run now."""
        return self._complete(view_of(self._ledger.status(self._now()), self.feed.seq))

    async def watch_status(self, since: int, timeout_s: float) -> ManagerStatus:
        """The status, once it is newer than `since` or `timeout_s` is over."""
        await self.feed.wait_beyond(since, timeout_s)
        status = self.status()
        if status.finished:
            self._final_read.set()
        return status

    def waits(self) -> Waits:
        """Who waits for whom."""
        now = self._now()
        return Waits(waits=tuple(wait.sentence(now) for wait in self._ledger.waits(now)))

    def drain(self, request: DrainRequest) -> DrainAnswer:
        """Drains an engine; again is harmless."""
        known = any(engine.engine == request.engine for engine in self.status().engines)
        if known:
            self._deliver(self._ledger.drain(request.engine, request.deadline_seconds, request.reason, self._now()))
        return DrainAnswer(engine=request.engine, known=known)

    def health(self) -> Health:
        """Written by the live loop."""
        return Health(run_epoch=self._run_epoch, uptime_seconds=self._loop.time() - self._started)

    async def see_off(self, deadline_s: float) -> bool:
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
