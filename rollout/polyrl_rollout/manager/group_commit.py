"""When the journal is synced: at once if somebody waits for it, else within QUIET_S; never two at a time, and one every
SHARED_S under load.

What is committed until the next one shares it. The loop goes on meanwhile: a slow disk delays messages, nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from queue import SimpleQueue
from threading import Thread
from typing import Final

from polyrl.errors import RunFailed
from polyrl_rollout.manager.journal import Journal

QUIET_S: Final = 1.0
"""A commit that nobody waits for is synced within so long: what a power cut takes of tokens, agents send again, but an
agent may be gone by then."""
SHARED_S: Final = 0.01
"""Between two syncs while one follows upon the other: each costs as much as some five frames of tokens, and a fleet in
which samples end all the time would pay that for each of them. An engine needs longer for a token."""
AT_ONCE: Final = 20
"""Syncs that may come one right after the other before that: what a trainer asks between two steps, one after the
other, is answered as fast as the disk can."""


class GroupCommit:
    """Syncs one journal."""

    def __init__(self, journal: Journal, on_synced: Callable[[], None]) -> None:
        """`on_synced` is called on the loop after each sync. A disk that fails is raised there, as RunFailed."""
        self._journal, self._on_synced = journal, on_synced
        self._loop = asyncio.get_running_loop()
        self._asked: SimpleQueue[bool] = SimpleQueue()
        """To the thread: whether to sync, or to end. A pool's futures cost more than the sync itself."""
        Thread(target=self._serve, name="journal", daemon=True).start()
        self._under_way: asyncio.Future[None] | None = None
        self._planned: asyncio.TimerHandle | None = None
        self._paid_until = -inf
        """Every sync since then would have come SHARED_S after the one before."""

    def plan(self, *, urgent: bool) -> None:
        """Something is not synced; `urgent`: somebody waits for it."""
        if self._under_way is not None or self._journal.synced >= self._journal.commits:
            return
        now = self._loop.time()
        at = self._paid_until - AT_ONCE * SHARED_S if urgent else now + QUIET_S
        if at <= now:
            self._begin()
        elif self._planned is None or at < self._planned.when():
            self._cancel()
            self._planned = self._loop.call_at(at, self._begin)

    async def until_safe(self) -> None:
        """Returns once all commits so far are on the disk. Raises RunFailed."""
        commits = self._journal.commits
        while self._journal.synced < commits:
            await asyncio.shield(self._under_way or self._begin())

    async def close(self) -> None:
        """Returns once no sync is under way; there will be none."""
        self._cancel()
        self._on_synced = _nothing
        if self._under_way is not None:
            await asyncio.wait([self._under_way])
        self._asked.put(False)

    def _begin(self) -> asyncio.Future[None]:
        self._cancel()
        # Orders that wait for the disk are not put off, and what they cost is not put on whoever comes after them.
        now = self._loop.time()
        self._paid_until = min(max(self._paid_until, now), now + AT_ONCE * SHARED_S) + SHARED_S
        self._under_way = self._loop.create_future()
        self._asked.put(True)
        return self._under_way

    def _cancel(self) -> None:
        if self._planned is not None:
            self._planned.cancel()
            self._planned = None

    def _serve(self) -> None:
        """The thread."""
        while self._asked.get():
            error = None
            try:
                self._journal.sync()
            except RunFailed as failed:
                error = failed
            self._loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: RunFailed | None) -> None:
        ended, self._under_way = self._under_way, None
        assert ended is not None
        if error is not None:
            ended.set_exception(error)
            ended.exception()  # known: it ends the run here
            raise error
        ended.set_result(None)
        self._on_synced()


def _nothing() -> None:
    """After the end nobody asks."""
