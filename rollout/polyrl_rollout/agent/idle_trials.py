"""Tries an engine anew whenever it has had nothing to do for a while, so that no sample has to.

Nothing waits for a trial: a sample, or weights that are to be loaded, end it, and then nothing is said of it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Final

from polyrl_rollout.engines.trial import AGAIN_S, Trial

BUSY_S: Final = 1.0
"""Pause between two looks at an engine that is to be tried and may not be just then."""


class IdleTrials:
    """Tries the engine whenever it is idle; `run` is a task beside the agent."""

    def __init__(
        self,
        idle_since: Callable[[], float | None],
        try_engine: Callable[[int], Awaitable[Trial]],
        *,
        report: Callable[[Trial], None],
    ) -> None:
        """`idle_since`: when the engine last gave a token, by the loop's clock; None: it works, or may not be tried.
        `try_engine` is called with 1, 2, ..."""
        self._idle_since, self._try_engine, self._report = idle_since, try_engine, report
        self._loop = asyncio.get_running_loop()
        self._tried_at = self._loop.time()
        self._trial: asyncio.Task[Trial] | None = None
        self._numbers = itertools.count(1)

    async def run(self) -> None:
        """Until cancelled, which ends a trial that is under way."""
        try:
            while True:
                await asyncio.sleep(self._due_in())
                if self._due_in() <= 0:
                    await self._try()
        finally:
            await self.stop()

    def cancel(self) -> None:
        """A trial that is under way ends soon."""
        # Once: a second cancellation would end the wait for the engine, which still runs its request.
        if self._trial is not None and not self._trial.cancelling():
            self._trial.cancel()

    async def stop(self) -> None:
        """As `cancel`; returns once it has ended."""
        self.cancel()
        if self._trial is not None:
            await asyncio.wait((self._trial,))

    def _due_in(self) -> float:
        since = self._idle_since()
        if since is None:
            return BUSY_S
        return max(0.0, max(since, self._tried_at) + AGAIN_S - self._loop.time())

    async def _try(self) -> None:
        trial = self._trial = asyncio.ensure_future(self._try_engine(next(self._numbers)))
        try:
            await asyncio.wait((trial,))
        finally:
            self._tried_at = self._loop.time()
        if not trial.cancelled():
            self._report(trial.result())
        self._trial = None
