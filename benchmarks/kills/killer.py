"""Kills rollouts at work (SIGKILL to the whole process group) at random moments, one after the other."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from typing import Final

from journal import Kill
from plan import Plan

from polyrl.status import EngineState
from polyrl_cli.local.manager import LocalManager
from polyrl_cli.local.process_fleet import ProcessFleet
from polyrl_cli.local.runner import LocalRun

JITTER_S: Final = 0.5
"""Upper end of a further random pause: the status comes five times a second, a kill at any moment."""

POLL_S: Final = 0.05
"""Between two reads of the status; `LocalRun` keeps the newest one and announces it to nobody."""

BETWEEN_S: Final = 60.0
"""Longest time from one kill to the next when no engine has to start."""


def longest_s(plan: Plan) -> float:
    """From one kill to the next."""
    return plan.start_s + BETWEEN_S


class LeaseOnly(LocalManager):
    """A runner that does not report to the manager whose process has ended: as with a machine that vanishes."""

    async def drain(self, engine: str, deadline_s: float, reason: str) -> bool:
        """Says nothing."""
        return True


class Killer:
    """Kills as often as the plan says."""

    def __init__(self, run: LocalRun, fleet: ProcessFleet, plan: Plan) -> None:
        self.kills: list[Kill] = []
        self._run, self._fleet, self._plan, self._random = run, fleet, plan, random.Random(plan.seed)

    async def kill(self) -> None:
        """Raises TimeoutError when rollouts do not come back."""
        for number in range(self._plan.kills):
            async with asyncio.timeout(longest_s(self._plan)):
                await self._generated(self._random.randint(*self._plan.tokens_between))
                await asyncio.sleep(self._random.uniform(0.0, JITTER_S))
                victim = self._random.choice(await self._at_work())
            self.kills.append(Kill(victim, time.time()))
            await self._fleet.kill(victim)
            print(f"kill {number + 1}: {victim}", file=sys.stderr, flush=True)

    async def _generated(self, tokens: int) -> None:
        goal = self._run.status.tokens.generated + tokens
        while self._run.status.tokens.generated < goal:  # noqa: ASYNC110 - the status has no event of its own
            await asyncio.sleep(POLL_S)

    async def _at_work(self) -> list[str]:
        """Rollouts that generate; waits until there is one, and another that serves, so that one is left."""
        gone = {kill.victim for kill in self.kills}
        while True:
            serving = [engine for engine in self._run.status.engines if engine.state is EngineState.SERVING]
            left = [engine for engine in serving if engine.name not in gone]
            busy = [engine.name for engine in left if engine.running]
            if busy and len(left) > 1:
                return busy
            await asyncio.sleep(POLL_S)
