"""Faults on the processes of a local run: those that a manifest declares, and those of `polyrl chaos`.

The runner injects them, since it started the processes: what it signals is what it started, never a stranger that got
the same process id. A fault that lasts is undone by the runner, at its end or at the run's; if the runner itself dies,
all its processes die with it, frozen or not. The planner replaces what a fault takes as after a real loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from polyrl.errors import UserError
from polyrl.local.fleet import ObservedWorker, SpotMarket
from polyrl.manifest.rollout import FaultAction, FaultSpec
from polyrl.status import ManagerStatus
from polyrl.worker import Role
from polyrl_cli.chaos.faults import Fault, signals_of
from polyrl_cli.chaos.kinds import ChaosAction, Part, Target

RL_PHASE: Final = "rl"
"""The trainer's name of the phase whose steps faults count. It reports whole steps, so the next one has begun then."""


class FaultyFleet(SpotMarket, Protocol):
    """A fleet whose workers can be hit; `ProcessFleet` fits it."""

    async def kill(self, name: str) -> None: ...

    def signal(self, name: str, part: Part, number: int) -> int: ...


class FaultInjector:
    """Injects faults and holds those that last. Must be closed while the loop still runs."""

    def __init__(self, fleet: FaultyFleet) -> None:
        self._fleet = fleet
        self._lasting: dict[str, asyncio.Task[None]] = {}

    def check(self, fault: Fault) -> None:
        """Raises UserError when there is no process to hit, or when it would last where another one does."""
        if not self._fleet.signal(fault.victim, signals_of(fault).part, 0):
            raise UserError(fault.no_process)
        if fault.lasts and fault.victim in self._lasting:
            raise UserError(fault.busy)

    async def inject(self, fault: Fault) -> None:
        """Begins; what lasts goes on in the background. A victim that has gone meanwhile is fine."""
        if fault.takes_capacity:
            await self._fleet.reclaim(fault.victim, fault.seconds if fault.action is ChaosAction.PREEMPT else 0.0)
        elif fault.action is ChaosAction.KILL and fault.target is Target.ENGINE:
            signals = signals_of(fault)
            self._fleet.signal(fault.victim, signals.part, signals.begin)
        elif fault.action is ChaosAction.KILL:
            await self._fleet.kill(fault.victim)
        else:
            task = asyncio.create_task(self._last(fault), name=f"fault of {fault.victim}")
            self._lasting[fault.victim] = task
            task.add_done_callback(lambda _: self._lasting.pop(fault.victim, None))

    async def close(self) -> None:
        """Undoes what still lasts."""
        tasks = list(self._lasting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _last(self, fault: Fault) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + fault.seconds
        part, begin, undo, on_s, off_s = signals_of(fault)
        while (left := end - loop.time()) > 0 and self._fleet.signal(fault.victim, part, begin):
            try:
                await asyncio.sleep(min(on_s, left))
            finally:
                self._fleet.signal(fault.victim, part, undo)
            await asyncio.sleep(off_s)


@dataclass(frozen=True)
class DueFault:
    """A fault that the manifest declares, with its victim."""

    fault: Fault
    at_step: int

    def __str__(self) -> str:
        return f"declared fault: {self.fault} at step {self.at_step}"


class FaultSchedule:
    """The declared faults that are still to come, in the order of their steps; each is due once."""

    def __init__(self, faults: Sequence[FaultSpec], done_steps: int = 0) -> None:
        """`done_steps`: RL steps that a resumed run does not repeat; their faults were injected before."""
        self.pending = sorted((fault for fault in faults if fault.at_step > done_steps), key=lambda f: f.at_step)

    def due(self, status: ManagerStatus, observed: Sequence[ObservedWorker]) -> DueFault | None:
        """The next fault, taken off the list; None while its step has not begun or no victim is at work."""
        if not self.pending or status.phase != RL_PHASE or status.step + 1 < self.pending[0].at_step:
            return None
        declared = self.pending[0]
        victim = _victim(declared, status, observed)
        if victim is None:
            return None
        self.pending.pop(0)
        kills = declared.action is FaultAction.KILL
        fault = Fault(
            action=ChaosAction.KILL if kills else ChaosAction.PREEMPT,
            target=Target.AGENT,
            victim=victim,
            role=Role.ROLLOUT,
            seconds=0.0 if kills else float(declared.notice_seconds),
        )
        return DueFault(fault, declared.at_step)


def _victim(declared: FaultSpec, status: ManagerStatus, observed: Sequence[ObservedWorker]) -> str | None:
    running = {engine.engine: engine.running for engine in status.engines}
    known = [seen for seen in observed if seen.role is Role.ROLLOUT and seen.counts and seen.name in running]
    if not known:
        return None
    known.sort(key=lambda seen: seen.started_at)
    victim = known[min(declared.rollout, len(known) - 1)].name
    # Within its own step a fault waits until the victim generates: to kill an idle engine would show nothing.
    return victim if running[victim] > 0 or status.step >= declared.at_step else None
