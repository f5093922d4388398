"""Injects a run's faults at their instants, by the very way of `polyrl chaos`: the runner finds a victim and hits it.

When there is no victim at that moment, because the one before is still being replaced, the next one that appears is
hit. Once the trainer has reported that the job is over nothing more is injected.

Refuses to hold: which faults (see `plan`), what became of the run (see `one_run`). Read next: `one_run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from plan import PlannedFault

from polyrl.errors import UserError
from polyrl_cli.local.runner import LocalRun

POLL_S: Final = 0.05
"""Between two reads of the status, and two searches for a victim; neither has an event of its own."""


class FaultInjector:
    """Works beside one run, until cancelled."""

    def __init__(self, run: LocalRun, faults: Sequence[PlannedFault], tokens: int) -> None:
        """`tokens`: what the undisturbed job generates."""
        self.injected: list[PlannedFault] = []
        self._run, self._faults, self._tokens = run, faults, tokens

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
                await self._run.inject_fault(fault.request)
            except UserError:
                await asyncio.sleep(POLL_S)
            else:
                self.injected.append(fault)
                return
