"""Which job is reconciled next: one entry per job however much happens to it, one worker per job at a time, and
namespaces in turn, so that a flood of jobs in one delays the others by one reconcile.

add(key)            something about the job changed; a thousand changes before its reconcile are one reconcile
hurry(key)          the same, and it waits for no new jobs, nor for edits, of its own namespace: a notice is short
wake_at(key, t)     reconcile again at t; only the earliest wake-up of a job counts
done(key)           all went well: what happens to it in the next moment is one reconcile again
failed(key)         it comes again later, each time later than before, or soon after a change
gone(key)           there is no such job any more: nothing of it is kept
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections.abc import Callable
from typing import Final

from polyrl.cluster.fair_queue import FairQueue, Urgency
from polyrl_operator.informer.cache import JobKey

MOST_OF_A_NAMESPACE: Final = 12
"""Reconciles of one namespace at a time, of the reconciler's 16: its jobs may all be slow, and others still begin."""

BESIDE_OTHERS: Final = 4
"""As many while other namespaces have jobs to reconcile, which then share the loop with few: an honest job beside a
flood has its status after 0.4 s and not after 1.4 s."""

FIRST_BACKOFF_S: Final = 0.5
"""After a first failure; doubles with each further one."""

MAX_BACKOFF_S: Final = 60.0
"""Longest pause between two reconciles of a job that keeps failing and to which nothing happens."""

MIN_PAUSE_S: Final = 0.5
"""Pause that no change cuts short: a job that fails on every event costs two reconciles a second, and a notice of
preemption still reaches the manager within its two seconds."""

SPACING_S: Final = 0.2
"""Between two reconciles of one job: pods that are made together start one after the other, and need none each. A tenth
of what may pass from a notice to its drain."""

SWEEP_AT: Final = 1024
"""Wake-ups that no longer count, beyond which they are dropped."""


class WorkQueue:
    """For one event loop. Keys are added from callbacks, taken by workers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: FairQueue[JobKey] = FairQueue(MOST_OF_A_NAMESPACE, BESIDE_OTHERS)
        """Due now."""
        self._busy: set[JobKey] = set()
        self._added_while_busy: set[JobKey] = set()
        self._urgent: dict[JobKey, Urgency] = {}
        """Not taken since they were hurried."""
        self._failures: dict[JobKey, int] = {}
        self._not_before: dict[JobKey, float] = {}
        self._wakes: list[tuple[float, JobKey]] = []
        self._wake_of: dict[JobKey, float] = {}
        self._changed = asyncio.Event()
        self._taken_at = float("-inf")

    def __len__(self) -> int:
        return len(self._waiting) + len(self._added_while_busy)

    def oldest_age(self) -> float:
        """Seconds that the key which waits longest has been due."""
        since = self._waiting.oldest()
        return 0.0 if since is None else self._clock() - since

    def stalled_for(self) -> float:
        """Seconds that keys have waited and none was taken: a flood makes the wait long, and is no fault of ours."""
        return min(self.oldest_age(), self._clock() - self._taken_at)

    def add(self, key: JobKey) -> None:
        """Due at once, or when its pause is over."""
        due = self._not_before.get(key, 0.0)
        if due > self._clock():
            self.wake_at(key, due)
        elif key in self._busy:
            self._added_while_busy.add(key)
        else:
            self._waiting.add(key.namespace, key, since=self._clock(), urgency=self._urgent.get(key, Urgency.NONE))
            self._changed.set()

    def hurry(self, key: JobKey, urgency: Urgency = Urgency.LOSS) -> None:
        """As `add`, before what is less urgent of its namespace."""
        self._urgent[key] = min(urgency, self._urgent.get(key, urgency))
        self.add(key)

    def wake_at(self, key: JobKey, when: float) -> None:
        """Adds it at `when` (of the clock), or earlier if it was to be woken earlier."""
        if when >= self._wake_of.get(key, float("inf")):
            return
        self._wake_of[key] = when
        heapq.heappush(self._wakes, (when, key))
        if len(self._wakes) > SWEEP_AT + 2 * len(self._wake_of):
            # Of jobs that are gone, or were to be woken later: their time may be a day away.
            self._wakes = [(at, one) for one, at in self._wake_of.items()]
            heapq.heapify(self._wakes)
        self._changed.set()

    async def take(self) -> JobKey:
        """Waits for a key that is due; call `done`, `failed` or `gone` afterwards."""
        while True:
            self._wake_due()
            if (key := self._waiting.take()) is not None:
                self._busy.add(key)
                self._urgent.pop(key, None)
                self._taken_at = self._clock()
                return key
            self._changed.clear()
            try:
                async with asyncio.timeout(self._until_wake()):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def done(self, key: JobKey) -> None:
        """Its reconcile went well."""
        self._failures.pop(key, None)
        self._not_before[key] = self._clock() + SPACING_S
        self._release(key)

    def failed(self, key: JobKey, least_s: float = 0.0) -> float:
        """Its reconcile failed; the seconds until the next if nothing happens: `least_s`, up to MAX_BACKOFF_S."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        pause = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 16)) * random.uniform(1, 1.5)
        pause = max(pause, min(least_s, MAX_BACKOFF_S))
        now = self._clock()
        self._not_before[key] = now + MIN_PAUSE_S
        self._release(key)
        self.wake_at(key, now + pause)
        return pause

    def forget_failures(self, key: JobKey) -> None:
        """Failures under this name were of a job that had it before."""
        self._failures.pop(key, None)

    def gone(self, key: JobKey) -> None:
        """Its reconcile found no job."""
        for kept in (self._failures, self._not_before, self._wake_of):
            kept.pop(key, None)
        self._urgent.pop(key, None)
        self._release(key)

    def _release(self, key: JobKey) -> None:
        self._busy.discard(key)
        self._waiting.release(key.namespace)
        # Another of its namespace may begin now.
        self._changed.set()
        if key in self._added_while_busy:
            self._added_while_busy.discard(key)
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
