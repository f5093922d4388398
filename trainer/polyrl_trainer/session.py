"""What all loops share of one run: its state, where it is saved, where it is reported, and whether it was asked to
stop.

Refuses to hold: the model (see `backend`), samples. Read next: `sft_loop`, the shortest of the loops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from polyrl_trainer.backend import TrainingBackend
from polyrl_trainer.checkpoints import Checkpoints
from polyrl_trainer.metrics.loggers import MetricsLogger
from polyrl_trainer.rollouts import Rollouts
from polyrl_trainer.state import TrainerState, TrainingStage

log = structlog.get_logger()

Result = TypeVar("Result")


@dataclass
class Session:
    """One run of the trainer."""

    state: TrainerState
    checkpoints: Checkpoints
    metrics: MetricsLogger
    checkpoint_every_steps: int
    rollouts: Rollouts | None = None
    """None in modes that run without a manager."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the run was asked to end; loops save and return."""
    max_manager_outage_s: float = 0.0
    """How long capacity may be away; loops wait for samples at least so long."""
    told: dict[str, float] = field(default_factory=dict)
    """What status shows until there is something newer, named as in `StepValue`."""

    def enter(self, stage: TrainingStage) -> None:
        """Begins a stage, or goes on with it when the state was loaded from its checkpoint."""
        if self.state.stage is not stage:
            self.state.stage, self.state.step, self.state.stage_done = stage, 0, False

    async def report(
        self,
        step: int,
        values: Mapping[str, float],
        phase: str | None = None,
        told: Mapping[str, float] | None = None,
    ) -> None:
        """To metrics, and to status when there is a manager; `told`, named as in `StepValue`, stays in status."""
        phase = phase or self.state.stage.value
        self.metrics.log(phase, step, values)
        self.told.update(told or {})
        if self.rollouts is not None:
            await self.rollouts.report(phase, step, {**values, **self.told})

    async def save(self, backend: TrainingBackend) -> None:
        """A checkpoint of the state as it is now, while the event loop lives on."""
        path = await asyncio.to_thread(self.checkpoints.save, self.state.copy(), backend)
        log.info("checkpoint saved", path=str(path), stage=self.state.stage.value, step=self.state.step)

    async def end_step(self, backend: TrainingBackend, total_steps: int) -> None:
        """Saves when it is time to: every so many steps, at the stage's end, and when asked to stop."""
        state = self.state
        state.results.steps[state.stage.value] = state.step
        state.stage_done = state.step >= total_steps
        if state.stage_done or self.stop.is_set() or state.step % self.checkpoint_every_steps == 0:
            await self.save(backend)

    async def unless_stopped(self, awaitable: Awaitable[Result]) -> Result | None:
        """The result, or None when the run is asked to stop first; the wait is then cancelled."""
        waiting = asyncio.ensure_future(awaitable)
        stopping = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return await waiting if waiting.done() else None
        finally:
            waiting.cancel()
            stopping.cancel()


def result_of(future: Future[Result]) -> Awaitable[Result]:
    """A backend's future as something to await: the loop host and the client live on meanwhile."""
    return asyncio.wrap_future(future)
