"""Steps of the run as the operator sees them go by: when one ends, what it measured, and whether that may be judged.

The trainer's report of a finished step travels with the manager's status; a new step number is the boundary between two
steps. A step counts only if it was watched from its start and the number of serving engines stayed the same.
Refuses to hold: what follows (see `gap`, `updates`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from polyrl.cluster.autoscaling.gap import StepMeasurement
from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.state import StepWatch
from polyrl.status import EngineState, StepValue

GENERATE: Final = (EngineState.SERVING, EngineState.SUSPECT)
"""States in which an engine takes part in a step."""

NEEDED: Final = {StepValue.ROLLOUT_SECONDS, StepValue.TRAIN_SECONDS, StepValue.STEP_SECONDS}
"""Without these a step cannot be judged."""


@dataclass(frozen=True)
class StepProgress:
    """What this look tells about steps."""

    watch: StepWatch | None
    """To be remembered."""
    measurement: StepMeasurement | None = None
    """The step that ended since the last look."""
    boundary: bool = False
    """True in the one look that sees a new step begin, and while no step is under way."""


def observe_step(ctx: ReconcileContext) -> StepProgress:
    """Compares with what was remembered. Without word from the manager nothing is known, and nothing begins."""
    reported, last = ctx.manager_status, ctx.state.watch
    if reported is None or not ctx.manager_answers:
        return StepProgress(last)
    serving = sum(engine.state in GENERATE for engine in ctx.engines.values())
    if last is None:
        return StepProgress(StepWatch(reported.step, serving, whole=False), boundary=not reported.trainer_connected)
    if reported.step == last.step:
        steady = last.whole and serving == last.engines
        return StepProgress(replace(last, whole=steady), boundary=not reported.trainer_connected)
    begun = StepWatch(reported.step, serving, whole=reported.step > last.step)
    return StepProgress(begun, _measured(ctx, last, serving), boundary=True)


def _measured(ctx: ReconcileContext, last: StepWatch, serving: int) -> StepMeasurement | None:
    values = ctx.manager_status.values if ctx.manager_status is not None else {}
    if ctx.manager_status is None or ctx.manager_status.step < last.step or not values.keys() >= NEEDED:
        return None
    alone = last.engines == 0 and ctx.spec.trainer.reserved_engine
    return StepMeasurement(
        step=ctx.manager_status.step,
        engines=last.engines,
        rollout_s=values[StepValue.ROLLOUT_SECONDS],
        train_s=values[StepValue.TRAIN_SECONDS],
        step_s=values[StepValue.STEP_SECONDS],
        reserved_s=values.get(StepValue.RESERVED_SECONDS, values[StepValue.ROLLOUT_SECONDS] if alone else 0.0),
        steady=last.whole and serving == last.engines and values.get(StepValue.POLLUTED_STEP, 0.0) < 0.5,
    )
