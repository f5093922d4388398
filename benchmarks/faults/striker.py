"""Inflicts a run's faults at their instants, by the very way of `polyrl chaos`: the runner finds a victim and hits it.

When there is no victim at that moment, because the one before is still being replaced, the next one that appears is
hit. Once the trainer has said that the job is over nothing more is inflicted.

Refuses to hold: which faults (see `plan`), what became of the run (see `one_run`). Read next: `one_run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from plan import Strike

from polyrl.errors import UserError
from polyrl_cli.local.runner import LocalRun

LOOK_S: Final = 0.05
"""Between two looks at the status, and for a victim; neither has an event of its own."""


class Striker:
    """Works beside one run, until cancelled."""

    def __init__(self, run: LocalRun, strikes: Sequence[Strike], tokens: int) -> None:
        """`tokens`: what the undisturbed job generates."""
        self.struck: list[Strike] = []
        self._run, self._strikes, self._tokens = run, strikes, tokens

    async def strike(self) -> None:
        """Returns when all faults have begun, or the job is over."""
        for strike in self._strikes:
            await self._generated(strike.share * self._tokens)
            await asyncio.sleep(strike.then_s)
            await self._hit(strike)

    async def _generated(self, tokens: float) -> None:
        run = self._run
        while not run.status.finished and run.status.tokens.generated < tokens:  # noqa: ASYNC110 - see LOOK_S
            await asyncio.sleep(LOOK_S)

    async def _hit(self, strike: Strike) -> None:
        while not self._run.status.finished:
            try:
                await self._run.inject_fault(strike.wish)
            except UserError:
                await asyncio.sleep(LOOK_S)
            else:
                self.struck.append(strike)
                return
