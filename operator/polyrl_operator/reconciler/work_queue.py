"""Whose turn it is: one entry per job however much happens to it, one worker per job at a time, wake-ups by the clock.

    add(key)            something about the job changed; a thousand changes before its turn are one turn
    wake_at(key, t)     look again at t; only the earliest wake-up of a job counts
    done(key)           its turn went well: what happens to it in the next moment is one turn again
    failed(key)         its turn failed: it comes again later, each time later than before, or soon after news

Refuses to hold: what a turn does (see `worker`). Read next: `worker`.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections.abc import Callable
from typing import Final

from polyrl_operator.informer.cached_object import JobKey

FIRST_BACKOFF_S: Final = 0.5
"""After a first failure; doubles with each further one."""

MAX_BACKOFF_S: Final = 60.0
"""Longest pause between two turns of a job that keeps failing and of which there is no news."""

MIN_PAUSE_S: Final = 0.5
"""Pause that news do not cut short: a job that fails on every event costs two turns a second, and a notice of
preemption is still told within its two."""


SPACING_S: Final = 0.2
"""Between two turns of one job: pods that are made together start one after the other, and need no turn each. A tenth
of what may pass from a notice to its drain."""


class WorkQueue:
    """For one event loop. Keys are added from callbacks, taken by workers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[JobKey, float] = {}
        """Due now, since when; in order."""
        self._busy: set[JobKey] = set()
        self._again: set[JobKey] = set()
        """Added while busy."""
        self._failures: dict[JobKey, int] = {}
        self._not_before: dict[JobKey, float] = {}
        self._wakes: list[tuple[float, JobKey]] = []
        self._wake_of: dict[JobKey, float] = {}
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._again)

    def oldest_age(self) -> float:
        """Seconds that the key which waits longest has been due."""
        since = next(iter(self._waiting.values()), None)
        return 0.0 if since is None else self._clock() - since

    def add(self, key: JobKey) -> None:
        """It is this job's turn, at once or when its pause is over."""
        due = self._not_before.get(key, 0.0)
        if due > self._clock():
            self.wake_at(key, due)
        elif key in self._busy:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting[key] = self._clock()
            self._news.set()

    def wake_at(self, key: JobKey, when: float) -> None:
        """Adds it at `when` (of the clock), or earlier if it was to be woken earlier."""
        if when >= self._wake_of.get(key, float("inf")):
            return
        self._wake_of[key] = when
        heapq.heappush(self._wakes, (when, key))
        self._news.set()

    async def take(self) -> JobKey:
        """Waits for a key whose turn it is; call `done` or `failed` afterwards. Ends when cancelled."""
        while True:
            self._wake_due()
            if self._waiting:
                key = next(iter(self._waiting))
                del self._waiting[key]
                self._busy.add(key)
                return key
            self._news.clear()
            try:
                async with asyncio.timeout(self._until_wake()):
                    await self._news.wait()
            except TimeoutError:
                continue

    def done(self, key: JobKey) -> None:
        """Its turn went well."""
        self._failures.pop(key, None)
        self._not_before[key] = self._clock() + SPACING_S
        self._release(key)

    def failed(self, key: JobKey) -> float:
        """Its turn went wrong; the seconds until its next without news."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        pause = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 16)) * random.uniform(1, 1.5)
        now = self._clock()
        self._not_before[key] = now + MIN_PAUSE_S
        self._release(key)
        self.wake_at(key, now + pause)
        return pause

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        for kept in (self._failures, self._not_before, self._wake_of):
            kept.pop(key, None)

    def _release(self, key: JobKey) -> None:
        self._busy.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _wake_due(self) -> None:
        now = self._clock()
        while self._wakes and self._wakes[0][0] <= now:
            when, key = heapq.heappop(self._wakes)
            if self._wake_of.get(key) == when:
                del self._wake_of[key]
                self.add(key)

    def _until_wake(self) -> float | None:
        return max(0.0, self._wakes[0][0] - self._clock()) if self._wakes else None
