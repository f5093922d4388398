"""When the journal is synced: at once while somebody waits for it, else within QUIET_S; never two at a time.

What is committed while a sync is under way shares the next one. The loop goes on meanwhile: a slow disk delays
messages, nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from polyrl_rollout.manager.journal import Journal

QUIET_S: Final = 1.0
"""A commit that nobody waits for is synced within so long: what a power cut takes of tokens, agents send again, but an
agent may be gone by then."""


class GroupCommit:
    """Syncs one journal."""

    def __init__(self, journal: Journal, on_synced: Callable[[], None]) -> None:
        """`on_synced` is called on the loop after each sync. A disk that fails is raised there, as RunFailed."""
        self._journal, self._on_synced = journal, on_synced
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._under_way: asyncio.Future[None] | None = None
        self._planned: asyncio.TimerHandle | None = None

    def plan(self, *, urgent: bool) -> None:
        """Something is not synced; `urgent`: somebody waits for it."""
        if self._under_way is not None or self._journal.synced >= self._journal.commits:
            return
        if urgent:
            self._begin()
        elif self._planned is None:
            self._planned = self._loop.call_later(QUIET_S, self._begin)

    async def until_safe(self) -> None:
        """Returns once all commits so far are on the disk. Raises RunFailed."""
        commits = self._journal.commits
        while self._journal.synced < commits:
            await asyncio.shield(self._under_way or self._begin())

    async def close(self) -> None:
        """Returns once no sync is under way; there will be none."""
        if self._planned is not None:
            self._planned.cancel()
        self._on_synced = _nothing
        if self._under_way is not None:
            await asyncio.wait([self._under_way])
        self._thread.shutdown(wait=False)

    def _begin(self) -> asyncio.Future[None]:
        if self._planned is not None:
            self._planned.cancel()
            self._planned = None
        self._under_way = self._loop.run_in_executor(self._thread, self._journal.sync)
        self._under_way.add_done_callback(self._end)
        return self._under_way

    def _end(self, ended: asyncio.Future[None]) -> None:
        self._under_way = None
        ended.result()
        self._on_synced()


def _nothing() -> None:
    """After the end nobody asks."""
