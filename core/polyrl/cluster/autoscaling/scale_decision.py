"""How many rollouts are desired now, by whoever decides: the gap, an autoscaler, or the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from polyrl.cluster.autoscaling.gap import Sizing, StepMeasurement, clamp, sizing
from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.rollouts import RolloutPod, of_pool
from polyrl.cluster.state import Recommendation, StepWatch
from polyrl.cluster.timestamps import millisecond, unix
from polyrl.manifest.scaling import ScalingMode
from polyrl.manifest.status import ScalingStatus
from polyrl.sample import Pool
from polyrl.status import EngineState, StepValue
from polyrl.worker import num_rollouts

TEXT: Final = 1024
"""Characters of a status text."""

FOLLOWS_GAP: Final = "the number follows the measured gap"


@dataclass(frozen=True)
class ScaleDecision:
    """The desired number and what led to it."""

    desired_replicas: int
    scaling: ScalingStatus
    active: bool
    """True while measurements move the number."""
    reason: str
    """Of the condition ScalingActive."""
    message: str
    window: tuple[Recommendation, ...] = ()
    """To be remembered."""
    changed: str = ""
    """The decision as a sentence, in the reconcile that changes the number."""


def scale_decision(ctx: ReconcileContext, fleet: Sequence[RolloutPod], step: StepObservation) -> ScaleDecision:
    """Of a running job."""
    stored, window, mode = ctx.status.scaling, ctx.state.recommendations, ctx.spec.scaling.mode
    if not ctx.wants_rollouts:
        return _not_measured(ctx, 0, "NotWanted", "this mode samples nothing to train on")
    if mode is not ScalingMode.GAP:
        who = "an autoscaler" if mode is ScalingMode.EXTERNAL else "the user"
        return _not_measured(ctx, num_rollouts(ctx.spec), mode.value, f"{who} decides on the number of rollouts")
    begun = ctx.status.start_time is not None
    current = clamp(ctx.spec, ctx.status.rollout.desired_replicas) if begun else num_rollouts(ctx.spec)
    if step.measurement is not None:
        return _measured(ctx, fleet, step.measurement, current)
    last = unix(stored.last_step_time)
    if last is None:
        return replace(_not_measured(ctx, current, "WarmUp", "no step has been measured yet"), window=window)
    limit = ctx.spec.scaling.gap.stale_after_seconds
    if ctx.now - last > limit:
        message = f"no step has been measured for more than {limit} s, so the number stays"
        return _not_measured(ctx, current, "MetricsStale", message)
    return ScaleDecision(current, stored, active=True, reason="Measured", message=FOLLOWS_GAP, window=window)


def _not_measured(ctx: ReconcileContext, desired: int, reason: str, message: str) -> ScaleDecision:
    return ScaleDecision(desired, ctx.status.scaling, active=False, reason=reason, message=message)


def stale_at(ctx: ReconcileContext) -> float | None:
    """When measurements become too old to move anything."""
    last = unix(ctx.status.scaling.last_step_time)
    return None if last is None else last + ctx.spec.scaling.gap.stale_after_seconds


def _measured(
    ctx: ReconcileContext, fleet: Sequence[RolloutPod], measurement: StepMeasurement, current: int
) -> ScaleDecision:
    stored = ctx.status.scaling
    scaled_at = unix(stored.last_scale_time)
    cooled = scaled_at is None or ctx.now - scaled_at >= ctx.spec.scaling.gap.cooldown_seconds
    num_on_demand = len(of_pool(fleet, Pool.ON_DEMAND))
    sized = sizing(ctx.spec, measurement, current, ctx.state.recommendations, cooled, num_on_demand)
    scaling = _status(ctx, stored, measurement, sized)
    decision = ScaleDecision(sized.desired_replicas, scaling, active=True, reason="Measured", message=FOLLOWS_GAP)
    return replace(decision, window=sized.window, changed=sized.why if sized.changed else "")


def _status(ctx: ReconcileContext, stored: ScalingStatus, measurement: StepMeasurement, sized: Sizing) -> ScalingStatus:
    return stored.model_copy(
        update={
            "last_step": measurement.step,
            "last_step_time": millisecond(ctx.now),
            "train_millis": _millis(measurement.train_s),
            "rollout_millis": _millis(measurement.rollout_s),
            "gap_millis": round((measurement.rollout_s - measurement.train_s) * 1000),
            "seed_millis": _millis(measurement.reserved_s),
            "recommended_replicas": max(0, sized.recommended),
            "last_scale_time": millisecond(ctx.now) if sized.changed else stored.last_scale_time,
            "last_reason": sized.why[:TEXT],
        }
    )


def _millis(seconds: float) -> int:
    return max(0, round(seconds * 1000))


GENERATE: Final = (EngineState.SERVING, EngineState.SUSPECT)
"""States in which an engine takes part in a step."""

NEEDED: Final = {StepValue.ROLLOUT_SECONDS, StepValue.TRAIN_SECONDS, StepValue.STEP_SECONDS}
"""Without these a step cannot be measured."""


@dataclass(frozen=True)
class StepObservation:
    """What this reconcile shows of the steps."""

    watch: StepWatch | None
    """To be remembered."""
    measurement: StepMeasurement | None = None
    """The step that ended since the last reconcile."""
    boundary: bool = False
    """True in the one reconcile that sees a new step begin, and while no step is under way."""


def observe_step(ctx: ReconcileContext) -> StepObservation:
    """Compares with what was remembered. Without word from the manager nothing is known, and nothing begins."""
    reported, last = ctx.manager_status, ctx.state.watch
    if reported is None or not ctx.manager_answers:
        return StepObservation(last)
    serving = sum(engine.state in GENERATE for engine in ctx.engines.values())
    if last is None:
        return StepObservation(StepWatch(reported.step, serving, whole=False), boundary=not reported.trainer_connected)
    if reported.step == last.step:
        steady = last.whole and serving == last.engines
        return StepObservation(replace(last, whole=steady), boundary=not reported.trainer_connected)
    begun = StepWatch(reported.step, serving, whole=reported.step > last.step)
    return StepObservation(begun, _finished_step(ctx, last, serving), boundary=True)


def _finished_step(ctx: ReconcileContext, last: StepWatch, serving: int) -> StepMeasurement | None:
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
