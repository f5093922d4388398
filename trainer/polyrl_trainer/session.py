"""What all loops share of one run: its state, where it is saved and reported, whether it was asked to stop, its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec
import structlog

from polyrl.checkpoints.last_save import SaveAction
from polyrl.errors import DiskRefused, RunFailed
from polyrl.sample import Purpose, Scored
from polyrl.sample_record import SampleRecord, to_report
from polyrl.wire import EngineMeasure
from polyrl_trainer.backend import TrainingBackend
from polyrl_trainer.checkpoints import Checkpoints, checkpoint_name, replace_file
from polyrl_trainer.checkpoints.saves import Saves
from polyrl_trainer.data.buffer import DataBuffer
from polyrl_trainer.metrics import MetricsLogger
from polyrl_trainer.rollouts import Rollouts
from polyrl_trainer.sample import Sample
from polyrl_trainer.sample_log.log import SampleLog
from polyrl_trainer.sinks.delivery import SinkReport
from polyrl_trainer.state import TrainerState, TrainingStage

log = structlog.get_logger()

Result = TypeVar("Result")

RESULT: Final = "trainer-result.json"
FAILED: Final = "failed"
"""Outcome of a run that ends by an error."""
LAST_ANSWER_S: Final = 2.0
"""Once asked to stop, the manager's answers are awaited for so long: the rest of the grace is there to save."""


@dataclass
class Session:
    """One run of the trainer."""

    state: TrainerState
    checkpoints: Checkpoints
    metrics: MetricsLogger
    checkpoint_every_steps: int
    rollouts: Rollouts | None = None
    """None in modes that run without a manager."""
    samples: SampleLog | None = None
    """None: what the model writes is not kept."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the run was asked to end; loops save and return."""
    critic: TrainingBackend | None = None
    """Saved beside the policy while one learns."""
    max_manager_outage_s: float = 0.0
    """How long capacity may be away; loops wait for samples at least so long."""
    grace_s: float = 15.0
    """From being asked to stop to the end."""
    leave_by: float | None = None
    """On the event loop's clock; None: nobody has asked to stop."""
    saves_beside_steps: bool = True
    """Else a step waits until it is saved, and nothing is copied."""
    skipped: str = ""
    """Why the last save was not begun."""
    status_values: dict[str, float] = field(default_factory=dict)
    """What status shows until there is something newer, named as in `StepValue`."""
    sequence_tokens_per_s: float | None = None
    """Speed of one sequence in the newest step, at least; None before the first."""
    weights_content: bytes = b""
    """Hash of the weights that rollouts generate with, whatever their version's number."""
    saves: Saves = field(init=False)
    _recorded: Sequence[SampleRecord] = ()
    """Kept since the last report, with which some of them go."""
    _unanswered: bool = False
    """Whether the manager has left a request without an answer since the run was asked to stop."""

    def __post_init__(self) -> None:
        self.saves = Saves(self.checkpoints)

    def enter(self, stage: TrainingStage, data: DataBuffer[Any] | None = None) -> None:
        """Begins a stage, or goes on with it and its data when the state was loaded from its checkpoint."""
        if self.state.stage is not stage:
            self.state.stage, self.state.step, self.state.stage_done = stage, 0, False
        if data is not None and stage in self.state.cursors:
            data.restore(self.state.cursors[stage])

    async def report(
        self,
        step: int,
        values: Mapping[str, float],
        phase: str = "",
        status_values: Mapping[str, float] | None = None,
        engines: Sequence[EngineMeasure] = (),
    ) -> None:
        """To metrics, and to status when there is a manager; `status_values` stay there until newer ones."""
        values = {**values, **self.saves.take_metrics()}
        phase = phase or self.state.stage.value
        self.metrics.log(phase, step, values, before=self._steps_before())
        self.status_values.update(status_values or {})
        if self.rollouts is not None:
            shown = {**values, **self.status_values}
            await self.answered(self.rollouts.report(phase, step, shown, to_report(self._recorded), engines))
        self._recorded = ()

    def keeps(self, purpose: Purpose) -> bool:
        """True when samples of this purpose are kept as text."""
        return self.samples is not None and self.samples.wants(purpose)

    def record(self, purpose: Purpose, samples: Sequence[Sample], scored: Sequence[Scored]) -> None:
        """Keeps texts of the step that is whole now, or of an evaluation after it; `scored` are the same samples."""
        if self.samples is not None and self.samples.wants(purpose):
            self._recorded = self.samples.record(self.state, purpose, samples, scored)
            self.metrics.log_samples(self._recorded, before=self._steps_before())

    def _steps_before(self) -> int:
        """Whole steps of the stages before this one."""
        return sum(count for stage, count in self.state.results.steps.items() if stage != self.state.stage.value)

    def end(self, run: Path, outcome: str) -> None:
        """Writes RUN/trainer-result.json; nothing is reported or kept after it. `outcome` is done, stopped or
        failed; empty where the successor writes the result."""
        try:
            if outcome:
                self._write_result(run, outcome)  # first: the sinks may take until this process is killed
        finally:
            sinks = self.metrics.close(outcome, result_of_run(self.state, outcome))
            if self.samples is not None:
                self.samples.close()
        if outcome and sinks:
            self._write_result(run, outcome, sinks)

    def _write_result(self, run: Path, outcome: str, sinks: Mapping[str, SinkReport] = MappingProxyType({})) -> None:
        try:
            write_result(run, self.state, outcome, sinks)
        except DiskRefused as error:
            if outcome != FAILED:
                raise
            log.error("the result is not written", reason=str(error))  # whoever ends the run has its own reason

    def ask_to_stop(self) -> None:
        """The grace begins, once."""
        if self.leave_by is None:
            self.leave_by = asyncio.get_running_loop().time() + self.grace_s
            log.info("asked to stop", grace=self.grace_s, saving=self.saves.why_unsaved())
        self.stop.set()

    def what_is_saved(self) -> str:
        """The end of a sentence, for whoever asked to stop."""
        newest, why = self.checkpoints.newest(), self.saves.why_unsaved() or self.skipped
        if newest is None:
            return f"nothing is saved{f': {why}' if why else ''}"
        now = checkpoint_name(self.state)
        is_newest = newest.name == now or not self.state.has_learned
        rest = "" if is_newest else f", and nothing after it up to {now}"
        return f"{newest.name} is saved{rest}{f': {why}' if why else ''}"

    async def save(self, backend: TrainingBackend) -> None:
        """A checkpoint of the state as it is now; none where it would not be over in time, and there is an older one.
        Returns once the state is copied; at a stage's end and when asked to stop, once it is durable. Raises what a
        save failed with, this one or the one before."""
        if self.rollouts is not None:
            self.state.acknowledged = list(self.rollouts.acknowledged)
        size = backend.state_bytes() + (0 if self.critic is None else self.critic.state_bytes())
        while (decision := self.saves.decide(self.state, size, self._left_s())).action is SaveAction.AWAIT:
            await self.saves.settle()
        self.skipped = decision.why
        if decision.action is SaveAction.BEGIN:
            await self._begin(backend, size)
        elif decision.action is SaveAction.LEAVE:
            log.warning("checkpoint not begun", reason=self.skipped, step=self.state.step)
        if self.stop.is_set() or self.state.stage_done:
            await self.saves.settle()

    async def _begin(self, backend: TrainingBackend, size: int) -> None:
        rollouts, acknowledged = self.rollouts, self.state.acknowledged

        def cover() -> None:
            if rollouts is not None:
                rollouts.cover(acknowledged)

        # Whoever waits for the disk in any case needs no copy.
        copied = self.saves_beside_steps and not (self.stop.is_set() or self.state.stage_done)
        await self.saves.begin(self.state, backend, self.critic, size=size, on_durable=cover, copied=copied)

    def _left_s(self) -> float | None:
        """Seconds left of the grace; None: any time, as for the end of a stage, which nobody computes again."""
        if self.leave_by is None or self.state.stage_done:
            return None
        return self.leave_by - asyncio.get_running_loop().time()

    async def close_saves(self) -> None:
        """What is in flight may end, within the grace where the run was asked to stop."""
        if self.leave_by is None:
            await self.saves.close()
        else:
            await self.saves.close(self.leave_by - asyncio.get_running_loop().time())

    async def end_step(self, backend: TrainingBackend, total_steps: int) -> None:
        """Saves when it is time to: every so many steps, at the stage's end, and when asked to stop."""
        state = self.state
        state.results.steps[state.stage.value] = state.step
        state.stage_done = state.step >= total_steps
        if state.stage_done or self.stop.is_set() or state.step % self.checkpoint_every_steps == 0:
            await self.save(backend)

    async def leave(self, backend: TrainingBackend, total_steps: int) -> None:
        """After a loop: saves what is not saved yet, where the run was asked to stop since its last step, or goes on
        with no more steps than were done."""
        state = self.state
        ends = state.step >= total_steps > 0
        if not state.stage_done and (ends or self.stop.is_set()):
            state.stage_done = ends
            await self.save(backend)

    async def answered(self, *requests: Awaitable[None]) -> None:
        """Waits until the manager has answered all; not for long once asked to stop, and once only, when it may be gone
        as well: what it has not heard it learns from the successor's greeting."""

        async def all_answered() -> list[None]:
            return await asyncio.gather(*requests)

        if await self.unless_stopped(all_answered(), 0.0 if self._unanswered else LAST_ANSWER_S) is None:
            self._unanswered = True

    async def unless_stopped(self, awaitable: Awaitable[Result], after_s: float = 0.0) -> Result | None:
        """The result, or None `after_s` after the run is asked to stop, or was; the wait is then cancelled."""
        waiting, stopping = asyncio.ensure_future(awaitable), asyncio.ensure_future(self._stopped(after_s))
        try:
            await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return await waiting if waiting.done() else None
        finally:
            waiting.cancel()
            stopping.cancel()

    async def _stopped(self, for_s: float) -> None:
        await self.stop.wait()
        await asyncio.sleep(for_s)


async def run_beside(main: Coroutine[Any, Any, Result], *services: Coroutine[Any, Any, None]) -> Result:
    """The result of `main`, which needs the services: raises its error, or that of the first service to end before."""
    main_task = asyncio.ensure_future(main)
    service_tasks = [asyncio.ensure_future(service) for service in services]
    try:
        await asyncio.wait({main_task, *service_tasks}, return_when=asyncio.FIRST_COMPLETED)
        if not main_task.done():
            _raise_end(next(service for service in service_tasks if service.done()))
        return await main_task
    finally:
        for task in (main_task, *service_tasks):
            task.cancel()
        await asyncio.gather(main_task, *service_tasks, return_exceptions=True)


def _raise_end(service: asyncio.Future[None]) -> None:
    error = service.exception()
    if error is None:
        raise RunFailed("the manager ended its conversation with the trainer before the run was over")
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    raise error


def write_result(
    run: Path, state: TrainerState, outcome: str, sinks: Mapping[str, SinkReport] = MappingProxyType({})
) -> None:
    """RUN/trainer-result.json, for the run's summary; `outcome` is done, stopped or failed."""
    result = result_of_run(state, outcome)
    result["sinks"] = {name: msgspec.structs.asdict(report) for name, report in sinks.items()}
    replace_file(run / RESULT, json.dumps(result, indent=2).encode() + b"\n")


def was_done(run: Path) -> bool:
    """True when a trainer in this folder got to the end before."""
    try:
        return bool(json.loads((run / RESULT).read_bytes())["outcome"] == "done")
    except FileNotFoundError:
        return False


def result_of_run(state: TrainerState, outcome: str) -> dict[str, Any]:
    """Names as in summary.json; seconds, counts and shares."""
    results = state.results
    longer = max(results.generate_seconds, results.rl_train_seconds)
    return {
        "outcome": outcome,
        "seed": state.seed,
        "exactMatch": {at: done["exact_match"] for at, done in results.evaluations.items() if "exact_match" in done},
        "evaluations": results.evaluations,
        "steps": results.steps,
        "optimizerSteps": results.optimizer_steps,
        "skippedOptimizerSteps": results.skipped_steps,
        "weightVersions": state.version + 1,
        "generateSeconds": round(results.generate_seconds, 3),
        "trainSeconds": round(results.train_seconds, 3),
        "rlTrainSeconds": round(results.rl_train_seconds, 3),
        "rlStepSeconds": round(results.rl_step_seconds, 3),
        "stepRatio": round(results.rl_step_seconds / longer, 4) if longer else None,
        "tokensTrained": results.tokens_trained,
        "paddingFraction": results.padded_positions / max(1, results.positions_computed),
        "droppedGroups": results.dropped_groups,
        "userCodeFailures": results.user_code_failures,
        "firstFailures": results.first_failures,
    }
