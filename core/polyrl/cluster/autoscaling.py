"""How many rollouts are desired: by an autoscaler, by the user, or by the gap between generation and training, from the
times of each finished step, steadied so that the fleet does not flap. Which pods make up that number is `fleet`'s.

Generation by n engines takes a + b / n seconds, fitted to the steps that were seen (`step_model`); training takes T:

    Throughput                the least n' with a + b / n' <= T: more engines would wait for the trainer, fewer make the
                              trainer wait; but none whose gain is below LEAST_STEP_GAIN
    ThroughputUnderBudget     the same, and whoever decides, never more than budgetPerHour pays for
    Cost                      the n' for which step time x hourly price is least; step time is max(T, a + b / n') plus
                              what is neither generating nor training, and with n' = 0 it is T plus a + b on the
                              reserved engine. Without pricing.reservedPerHour only rollouts cost money, and the answer
                              is min

A rollout counts as much as the reserved engine, for the seconds in which that may generate; engines that came or went
during a step count for the time that they were there. The manager has integrated that, and keeps it
(`status.FinishedStep`); what steps asked for is in the job's status. So nothing hangs on this process: one that starts
anew goes on with the steps that ended meanwhile, and counts none twice.
Not measured: a trainer's first step, in which engines still started.
Then: within the dead band nothing grows, and only what does not pay shrinks; up by the least of its window, down by the
most; each bounded per step; none within the cooldown; always within minReplicas and maxReplicas. "Now" is the desired
number, which counts rollouts that are still starting or that capacity withholds, so that a slow start is not answered
with more of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.rollouts import RolloutPod, of_pool
from polyrl.cluster.reasons import ScalingReason
from polyrl.cluster.step_model import LEAST_STEP_GAIN, SHORTEST_S, StepModel, fit_steps, is_measure
from polyrl.cluster.timestamps import millisecond, unix
from polyrl.manifest.rollout import CapacityPolicy
from polyrl.manifest.scaling import Objective, ScalingMode
from polyrl.manifest.spec import JobSpec
from polyrl.manifest.status import ScalingStatus
from polyrl.sample import Pool
from polyrl.status import MAX_MEASURE, FinishedStep, ManagerStatus, StepValue
from polyrl.worker import num_rollouts

STALE_STEPS: Final = 3.0
"""Measurements are not too old before that many steps of the last one's length, however long that is."""

STICKINESS: Final = 3.0
"""A fleet shrinks only where engines gain less than LEAST_STEP_GAIN divided by 1 + this x tolerance: no fit is exact,
and what just paid must not be given back for its error."""


@dataclass(frozen=True)
class Sizing:
    """What a step's measurement led to."""

    desired_replicas: int
    """Rollouts from now on."""
    recommended: int
    """What the step alone asks for, before windows and bounds."""
    window: tuple[int, ...]
    """What the newest steps asked for."""
    why: str
    """The decision with its numbers."""
    changed: bool = False


def clamp(spec: JobSpec, desired: int) -> int:
    """Within minReplicas and maxReplicas."""
    return max(spec.rollout.min_replicas, min(desired, spec.rollout.max_replicas))


def sizing(
    spec: JobSpec,
    steps: Sequence[FinishedStep],
    last: int,
    current: int,
    window: tuple[int, ...],
    cooled: bool,
    num_on_demand: int,
) -> Sizing:
    """After finished `steps`, of which those after step `last` are new. `window`: what those before asked for;
    `cooled`: the last change is longer ago than the cooldown; `num_on_demand`: of now, for the budget."""
    newest, rule = steps[-1], spec.scaling.gap
    prefix, asked = _describe(newest), current
    new = new_steps(steps, last)
    for place, step in enumerate(steps):
        if step.steady and step in new:
            asked = _asked(spec, steps[: place + 1], num_on_demand, current)
            window = (*window, asked)[-max(rule.scale_up_window_steps, rule.scale_down_window_steps) :]
    if not newest.steady:
        return Sizing(current, asked, window=window, why=f"{prefix}; not measured, because it was no ordinary step")
    desired = _steadied(spec, current, window)
    if desired == current:
        return Sizing(current, asked, window=window, why=f"{prefix}: asks for {asked}, stays at {current}")
    if not cooled:
        pause = f"until {rule.cooldown_seconds} s after the last change"
        return Sizing(current, asked, window=window, why=f"{prefix}: asks for {asked}, stays at {current} {pause}")
    return Sizing(
        desired, asked, window=window, why=f"{prefix}: asks for {asked}, {current} -> {desired}", changed=True
    )


def new_steps(steps: Sequence[FinishedStep], last: int) -> Sequence[FinishedStep]:
    """Those after step `last`. A trainer that went back to a checkpoint does steps again; a newest
    step before `last` shows that."""
    if not steps or steps[-1].step == last:
        return ()
    return [step for step in steps if step.step > last] or steps[-1:]


def _asked(spec: JobSpec, steps: Sequence[FinishedStep], num_on_demand: int, current: int) -> int:
    """The dead band is about keeping pace, and about the whole fleet: a rollout that was lost for half a step comes
    back by itself. Who surely gains nothing leaves there as well: a tail that takes as long as training is within it
    with any fleet. With objective Cost the cheapest fleet need not keep pace."""
    newest, model = steps[-1], _model(steps)
    rollout_s = model.seconds(max(newest.engines, current)) if is_measure(newest) else newest.rollout_seconds
    within = abs(_gap(newest, rollout_s)) <= spec.scaling.gap.tolerance_percent
    if within and spec.scaling.objective is not Objective.COST:
        return min(current, model.wanted(0.0, _rest(newest), _sure_gain(spec))) if is_measure(newest) else current
    return recommend(spec, steps, num_on_demand, current)


def _model(steps: Sequence[FinishedStep]) -> StepModel:
    """By all of them, as of the last one."""
    if not is_measure(steps[-1]):
        return StepModel(0.0, 0.0)
    return fit_steps([step for step in steps if is_measure(step)]).through(steps[-1])


def recommend(spec: JobSpec, steps: Sequence[FinishedStep], num_on_demand: int, current: int = 0) -> int:
    """Rollouts that the objective asks for after the last of these steps, before bounds; no fewer than `current` unless
    fewer surely do."""
    newest, model = steps[-1], _model(steps)
    rest_s = _rest(newest)
    enough = model.wanted(newest.train_seconds, rest_s)
    if enough < current and spec.scaling.objective is not Objective.COST:
        enough = max(enough, min(current, model.wanted(newest.train_seconds, rest_s, _sure_gain(spec))))
    match spec.scaling.objective:
        case Objective.THROUGHPUT:
            return enough
        case Objective.THROUGHPUT_UNDER_BUDGET:
            return affordable(spec, enough, num_on_demand)
        case Objective.COST:
            choices = range(spec.rollout.min_replicas, clamp(spec, enough) + 1)
            return min(choices, key=lambda n: (_cost(spec, newest, model, n), n))


def _sure_gain(spec: JobSpec) -> float:
    """What is gained less by surely does not pay."""
    return LEAST_STEP_GAIN / (1 + STICKINESS * spec.scaling.gap.tolerance_percent / 100)


def _rest(step: FinishedStep) -> float:
    """Seconds of it that are neither generating nor training."""
    return max(0.0, step.step_seconds - max(step.rollout_seconds, step.train_seconds))


def _gap(step: FinishedStep, rollout_s: float) -> float:
    """In per cent of the step."""
    return 100 * (rollout_s - step.train_seconds) / max(step.step_seconds, SHORTEST_S)


def hourly(spec: JobSpec, rollouts: int, num_on_demand: int = 0) -> float:
    """Price of a fleet for an hour; at least `num_on_demand` of them, and baseOnDemand, at the on-demand price."""
    spot, on_demand = spec.pricing.spot_per_hour or 0.0, spec.pricing.on_demand_per_hour or 0.0
    if spec.rollout.capacity.policy is CapacityPolicy.ON_DEMAND:
        return rollouts * on_demand
    costly = min(rollouts, max(num_on_demand, spec.rollout.capacity.base_on_demand))
    return costly * on_demand + (rollouts - costly) * spot


def _describe(step: FinishedStep) -> str:
    gap = _gap(step, step.rollout_seconds)
    return (
        f"step {step.step}: {step.engines:.3g} engines generated for {step.rollout_seconds:.1f} s, training took"
        f" {step.train_seconds:.1f} s of {step.step_seconds:.1f} s, gap {gap:.0f} %, one engine more would have saved"
        f" {step.next_engine_saves_seconds:.1f} s"
    )


def _steadied(spec: JobSpec, current: int, window: tuple[int, ...]) -> int:
    rule = spec.scaling.gap
    ups, downs = window[-rule.scale_up_window_steps :], window[-rule.scale_down_window_steps :]
    if len(ups) == rule.scale_up_window_steps and min(ups) > current:
        return clamp(spec, min(min(ups), current + rule.max_scale_up_per_step))
    if len(downs) == rule.scale_down_window_steps and max(downs) < current:
        return clamp(spec, max(max(downs), current - rule.max_scale_down_per_step))
    return current


def affordable(spec: JobSpec, rollouts: int, num_on_demand: int = 0) -> int:
    """As many of them as the budget pays for; all where the objective has none."""
    if spec.scaling.objective is not Objective.THROUGHPUT_UNDER_BUDGET:
        return rollouts
    budget = spec.scaling.budget_per_hour or 0.0
    return max((n for n in range(rollouts + 1) if hourly(spec, n, num_on_demand) <= budget), default=0)


def affordable_on_demand(spec: JobSpec, rollouts: int) -> int:
    """How many of a fleet of that size may be on-demand, stand-ins included; all where the objective has no budget."""
    if spec.scaling.objective is not Objective.THROUGHPUT_UNDER_BUDGET:
        return rollouts
    budget = spec.scaling.budget_per_hour or 0.0
    return max((n for n in range(rollouts + 1) if hourly(spec, rollouts, n) <= budget), default=0)


def _cost(spec: JobSpec, step: FinishedStep, model: StepModel, rollouts: int) -> float:
    """Cost of one step with that many rollouts, in pricing.currency."""
    train_s = step.train_seconds
    paced = max(train_s, model.seconds(rollouts)) if rollouts else train_s + model.seconds(1)
    if rollouts == 0 and not spec.trainer.reserved_engine:
        return math.inf
    return (paced + _rest(step)) * ((spec.pricing.reserved_per_hour or 0.0) + hourly(spec, rollouts)) / 3600


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
    return replace(decision, desired_replicas=affordable(ctx.spec, decision.desired_replicas))


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
    num_on_demand = len(of_pool(fleet, Pool.ON_DEMAND))
    sized = sizing(ctx.spec, steps, stored.last_step, current, tuple(stored.window), cooled, num_on_demand)
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
