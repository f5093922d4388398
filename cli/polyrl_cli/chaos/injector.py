"""Inflicts faults on the processes of a live run: the manifest's own drill and `polyrl chaos` alike.

The runner does it, since it started the processes: what it signals is what it started, never a stranger that got the
same process id. A fault that lasts is undone by the runner, at its end or at the run's; if the runner itself dies, all
its processes die with it, frozen or not.

Refuses to hold: who is hit (see `faults`), by which signal (see `fault_signals`). Read next: `process_fleet`.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from polyrl.errors import UserError
from polyrl_cli.chaos.faults import Fault
from polyrl_cli.chaos.kinds import ChaosAction, Target
from polyrl_cli.chaos.signals import signals_of
from polyrl_cli.local.process_fleet import Part


class Victims(Protocol):
    """What is needed of a fleet; `ProcessFleet` fits it."""

    async def kill(self, name: str) -> None: ...

    async def reclaim(self, name: str, notice_s: float) -> None: ...

    def signal(self, name: str, part: Part, number: int) -> int: ...


class FaultInjector:
    """Holds what is under way. Must be closed while the loop still runs."""

    def __init__(self, fleet: Victims) -> None:
        self._fleet = fleet
        self._lasting: dict[str, asyncio.Task[None]] = {}

    def check(self, fault: Fault) -> None:
        """Raises UserError when there is no process to hit, or when it would last where another one does."""
        if not self._fleet.signal(fault.victim, signals_of(fault).part, 0):
            raise UserError(fault.nobody)
        if fault.lasts and fault.victim in self._lasting:
            raise UserError(fault.another)

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
