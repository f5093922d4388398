"""The GPU that the learner shares with an engine: what is seen of it, and whether the next batch needs it alone.

What other processes hold is watched while a batch is awaited: then engines are awake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import structlog

from polyrl.engines.hand_over import DeviceUse, HandOverPlan, plan_hand_over
from polyrl.manifest.spec import ReservedSleep

T = TypeVar("T")

GPU_WATCH_S: Final = 0.5
"""Nothing says when another process takes memory; a question to the driver takes some microseconds."""

log = structlog.get_logger()


class SharedDevices:
    """Devices of one learner; of several ranks the first one's GPU stands for all."""

    def __init__(self, sleep: ReservedSleep, measure: Callable[[], DeviceUse | None]) -> None:
        """`measure` asks the driver; None without a GPU."""
        self._sleep, self._measure = sleep, measure
        self._others = 0
        self._plan: HandOverPlan | None = None

    def needs_alone(self) -> bool:
        """Whether the next batch is to come when engines sleep."""
        plan = plan_hand_over(self._sleep, self._see(), self._others)
        if self._plan is None or plan.alone != self._plan.alone:
            log.info("the learner has its GPU alone" if plan.alone else "engines stay awake", reason=plan.why)
        self._plan = plan
        return plan.alone

    async def watched(self, awaited: Awaitable[T]) -> T:
        """What `awaited` gives; meanwhile the GPU is watched."""
        if self._sleep is not ReservedSleep.AUTO or self._see() is None:
            return await awaited
        watching = asyncio.create_task(self._watch())
        try:
            return await awaited
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(GPU_WATCH_S)
            self._see()

    def _see(self) -> DeviceUse | None:
        use = self._measure()
        self._others = max(self._others, use.others if use is not None else 0)
        return use


def not_shared() -> SharedDevices:
    """Devices of a learner beside which no engine can sleep."""
    return SharedDevices(ReservedSleep.NEVER, lambda: None)
