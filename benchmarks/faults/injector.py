"""Injects a run's faults at their instants, by the very way of `polyrl chaos`: the runner finds a victim and hits it.
Where somebody else is to do it (`plan.Hand`), the victim is found by its script, and the runner hears nothing.

When there is no victim at that moment, because the one before is still being replaced, the next one that appears is
hit. Once the trainer has reported that the job is over nothing more is injected.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil
from jobs import JobKind
from plan import Hand, PlannedFault

from polyrl.errors import UserError
from polyrl.forks.server import SERVING
from polyrl.testing.started import words_of
from polyrl_cli.chaos.kinds import Target
from polyrl_cli.local.runner import LocalRun
from polyrl_rollout.testing.power_loss import PowerSwitch

POLL_S: Final = 0.05
"""Between two reads of the status, and two searches for a victim; neither has an event of its own."""


class Victims:
    """The living processes of one run, for somebody who is not its runner."""

    def __init__(self, kind: JobKind, root: Path) -> None:
        """`root`: the run's folder."""
        self._scripts = {Target.AGENT: kind.agent, Target.TRAINER: kind.trainer, Target.MANAGER: kind.manager}
        self._root = root

    def end(self, fault: PlannedFault) -> None:
        """Of several the youngest, which may be starting. Raises UserError while there is none, NoSuchProcess."""
        found = sorted(self._of(fault.request.target), key=lambda process: -process.create_time())
        if not found:
            raise UserError(f"no {fault.request.target} lives")
        found[0].send_signal(PowerSwitch.SIGNAL if fault.hand is Hand.POWER else signal.SIGKILL)

    def _of(self, target: Target) -> Iterable[psutil.Process]:
        if target is Target.ENGINE:
            below = [child for agent in self._of(Target.AGENT) for child in agent.children()]
            return [child for child in below if " ".join(words_of(child)) != SERVING]
        ours = [one for one in psutil.Process().children(recursive=True) if belongs(one, self._root)]
        return [one for one in ours if any(word.endswith(self._scripts[target]) for word in words_of(one))]


def belongs(process: psutil.Process, root: Path) -> bool:
    """Whether it is of the run in this folder: its output goes there, and so does that of whatever it starts. The
    environment of a process that was forked is not to be seen from outside."""
    with suppress(OSError):  # it has ended, or is somebody else's
        return Path(os.readlink(f"/proc/{process.pid}/fd/2")).is_relative_to(root)
    return False


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
