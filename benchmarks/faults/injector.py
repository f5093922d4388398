"""Injects a run's faults at their instants, by the very way of `polyrl chaos`: the runner finds a victim and hits it.
Where somebody else is to do it (`plan.Hand`), the victim is found by its script, and the runner hears nothing.

When there is no victim at that moment, because the one before is still being replaced, the next one that appears is
hit. Once the trainer has reported that the job is over nothing more is injected.

Refuses to hold: which faults (see `plan`), what became of the run (see `one_run`). Read next: `one_run`.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable, Sequence
from typing import Final

import psutil
from jobs import MARK, JobKind
from plan import Hand, PlannedFault

from polyrl.errors import UserError
from polyrl_cli.chaos.kinds import Target
from polyrl_cli.local.runner import LocalRun
from polyrl_rollout.testing.power_loss import PowerSwitch

POLL_S: Final = 0.05
"""Between two reads of the status, and two searches for a victim; neither has an event of its own."""


class Victims:
    """The living processes of one run, for somebody who is not its runner."""

    def __init__(self, kind: JobKind, mark: str) -> None:
        """`mark`: of the run."""
        self._scripts = {Target.AGENT: kind.agent, Target.TRAINER: kind.trainer, Target.MANAGER: kind.manager}
        self._mark = mark

    def end(self, fault: PlannedFault) -> None:
        """Of several the youngest, which may be starting. Raises UserError while there is none, NoSuchProcess."""
        found = sorted(self._of(fault.request.target), key=lambda process: -process.create_time())
        if not found:
            raise UserError(f"no {fault.request.target} lives")
        found[0].send_signal(PowerSwitch.SIGNAL if fault.hand is Hand.POWER else signal.SIGKILL)

    def _of(self, target: Target) -> Iterable[psutil.Process]:
        if target is Target.ENGINE:
            return [child for agent in self._of(Target.AGENT) for child in agent.children()]
        marked = [one for one in psutil.Process().children(recursive=True) if is_marked(one, self._mark)]
        return [one for one in marked if any(word.endswith(self._scripts[target]) for word in _words(one))]


def is_marked(process: psutil.Process, mark: str) -> bool:
    """Whether it belongs to the run with this mark."""
    try:
        return process.environ().get(MARK) == mark
    except psutil.Error:
        return False


def _words(process: psutil.Process) -> Sequence[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return ()


class FaultInjector:
    """Works beside one run, until cancelled."""

    def __init__(self, run: LocalRun, victims: Victims, faults: Sequence[PlannedFault], tokens: int) -> None:
        """`tokens`: what the undisturbed job generates."""
        self.injected: list[PlannedFault] = []
        self._run, self._victims, self._faults, self._tokens = run, victims, faults, tokens

    async def inject_all(self) -> None:
        """Returns when all faults have begun, or the job is over."""
        for fault in self._faults:
            await self._generated(fault.share * self._tokens)
            await asyncio.sleep(fault.then_s)
            await self._inject(fault)

    async def _generated(self, tokens: float) -> None:
        run = self._run
        while not run.status.finished and run.status.tokens.generated < tokens:  # noqa: ASYNC110 - see LOOK_S
            await asyncio.sleep(POLL_S)

    async def _inject(self, fault: PlannedFault) -> None:
        while not self._run.status.finished:
            try:
                if fault.hand is Hand.RUNNER:
                    await self._run.inject_fault(fault.request)
                else:
                    self._victims.end(fault)
            except (UserError, psutil.NoSuchProcess):
                await asyncio.sleep(POLL_S)
            else:
                self.injected.append(fault)
                return
