"""How many rollouts a job should have now, and why: whoever decides, no more than the budget pays for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.rollouts import RolloutPod, of_pool
from polyrl.cluster.reasons import ScalingReason
from polyrl.cluster.scaling.gap import FleetSize, clamp, new_steps, sizing
from polyrl.cluster.scaling.prices import affordable
from polyrl.cluster.timestamps import millisecond, unix
from polyrl.manifest.scaling import ScalingMode
from polyrl.manifest.status import ScalingStatus
from polyrl.sample import Pool
from polyrl.status import MAX_MEASURE, ManagerStatus, StepValue
from polyrl.worker import num_rollouts

STALE_STEPS: Final = 3.0
"""Measurements are not too old before that many steps of the last one's length, however long that is."""

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
    reason: ScalingReason
    message: str
    changed: str = ""
    """The decision as a sentence, in the reconcile that changes the number."""


def scale_decision(ctx: ReconcileContext, fleet: Sequence[RolloutPod]) -> ScaleDecision:
    """How many rollouts a running job should have, and why; whoever decides, no more than the budget pays for."""
    decision = _decided(ctx, fleet)
    desired = affordable(ctx.spec, decision.desired_replicas)
    return replace(decision, desired_replicas=desired, changed=_changed(ctx, decision, desired))


def _changed(ctx: ReconcileContext, decision: ScaleDecision, desired: int) -> str:
    """As a sentence also where an edit changes the number, of bounds, budget or prices."""
    before = ctx.status.rollout.desired_replicas
    allowed = affordable(ctx.spec, clamp(ctx.spec, before))
    by_gap = ctx.spec.scaling.mode is ScalingMode.GAP and ctx.wants_rollouts
    if not by_gap or ctx.status.start_time is None or allowed == before:
        return decision.changed
    edited = f"minReplicas, maxReplicas and budgetPerHour allow {allowed}: {before} -> {allowed}"
    return edited if desired == allowed else f"{edited}; {decision.changed}"


def _decided(ctx: ReconcileContext, fleet: Sequence[RolloutPod]) -> ScaleDecision:
    stored, mode = ctx.status.scaling, ctx.spec.scaling.mode
    if not ctx.wants_rollouts:
        return _not_measured(ctx, 0, ScalingReason.NOT_WANTED, "this mode samples nothing to train on")
    if mode is not ScalingMode.GAP:
        who = "an autoscaler" if mode is ScalingMode.EXTERNAL else "the user"
        return _not_measured(
            ctx, num_rollouts(ctx.spec), ScalingReason(mode.value), f"{who} decides on the number of rollouts"
        )
    begun = ctx.status.start_time is not None
    current = clamp(ctx.spec, ctx.status.rollout.desired_replicas) if begun else num_rollouts(ctx.spec)
    reported = ctx.manager_status
    if reported is not None and ctx.manager_answers and new_steps(reported.finished_steps, stored.last_step):
        return _measured(ctx, fleet, reported, current)
    last = unix(stored.last_step_time)
    if last is None:
        return _not_measured(ctx, current, ScalingReason.WARM_UP, "no step has been measured yet")
    limit = _stale_after_s(ctx)
    if ctx.now - last > limit:
        message = f"no step has been measured for more than {limit:.0f} s, so the number stays"
        return _not_measured(ctx, current, ScalingReason.METRICS_STALE, message)
    return ScaleDecision(current, stored, active=True, reason=ScalingReason.MEASURED, message=FOLLOWS_GAP)


def _not_measured(ctx: ReconcileContext, desired: int, reason: ScalingReason, message: str) -> ScaleDecision:
    return ScaleDecision(desired, ctx.status.scaling, active=False, reason=reason, message=message)


def stale_at(ctx: ReconcileContext) -> float | None:
    """When measurements become too old to move anything."""
    last = unix(ctx.status.scaling.last_step_time)
    return None if last is None else last + _stale_after_s(ctx)


def _stale_after_s(ctx: ReconcileContext) -> float:
    step_s = ctx.manager_status.values.get(StepValue.STEP_SECONDS, 0.0) if ctx.manager_status is not None else 0.0
    return max(float(ctx.spec.scaling.gap.stale_after_seconds), STALE_STEPS * step_s)


def _measured(
    ctx: ReconcileContext, fleet: Sequence[RolloutPod], reported: ManagerStatus, current: int
) -> ScaleDecision:
    stored, steps = ctx.status.scaling, reported.finished_steps
    scaled_at = unix(stored.last_scale_time)
    cooled = scaled_at is None or ctx.now - scaled_at >= ctx.spec.scaling.gap.cooldown_seconds
    size = FleetSize(
        current, last_change=stored.last_change, num_on_demand=len(of_pool(fleet, Pool.ON_DEMAND)), cooled=cooled
    )
    sized = sizing(ctx.spec, steps, stored.last_step, tuple(stored.window), size)
    newest = steps[-1]
    update = {
        "last_step": newest.step,
        "last_step_time": millisecond(ctx.now),
        "train_millis": _millis(newest.train_seconds),
        "rollout_millis": _millis(newest.rollout_seconds),
        "gap_millis": round((newest.rollout_seconds - newest.train_seconds) * 1000),
        "seed_millis": _millis(reported.values.get(StepValue.RESERVED_SECONDS, 0.0)),
        "recommended_replicas": max(0, sized.recommended),
        "window": list(sized.window),
        "last_scale_time": millisecond(ctx.now) if sized.changed else stored.last_scale_time,
        "last_change": sized.desired_replicas - current if sized.changed else stored.last_change,
        "last_reason": sized.why[:TEXT],
    }
    return ScaleDecision(
        sized.desired_replicas,
        stored.model_copy(update=update),
        active=True,
        reason=ScalingReason.MEASURED,
        message=FOLLOWS_GAP,
        changed=sized.why if sized.changed else "",
    )


def _millis(seconds: float) -> int:
    return round(min(max(0.0, seconds), MAX_MEASURE) * 1000)


def between_steps(ctx: ReconcileContext) -> bool:
    """True in the one reconcile that sees a new step begin, and while no step is under way. Without word from the
    manager nothing is known, and nothing begins."""
    reported = ctx.manager_status
    if reported is None or not ctx.manager_answers:
        return False
    return reported.step != ctx.status.manager.step or not reported.trainer_connected
