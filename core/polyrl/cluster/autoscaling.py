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

A rollout counts as much as the reserved engine, for the seconds in which that generated. Rollouts that came or went
during a step count for the time that they were there.
Not measured: steps with validation or a checkpoint in them, and the one that was under way when the operator started.
Then: within the dead band nothing changes; up by the least of its window, down by the most; each bounded per step; none
within the cooldown; always within minReplicas and maxReplicas. "Now" is the desired number, which counts rollouts that
are still starting or that capacity withholds, so that a slow start is not answered with more of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.rollouts import RolloutPod, of_pool
from polyrl.cluster.reasons import ScalingReason
from polyrl.cluster.state import Recommendation, StepWatch
from polyrl.cluster.step_model import LEAST_STEP_GAIN, SeenStep, StepModel, fit_steps, keep_step
from polyrl.cluster.timestamps import millisecond, unix
from polyrl.manifest.rollout import CapacityPolicy
from polyrl.manifest.scaling import Objective, ScalingMode
from polyrl.manifest.spec import JobSpec
from polyrl.manifest.status import ScalingStatus
from polyrl.sample import Pool
from polyrl.status import EngineState, StepValue
from polyrl.worker import num_rollouts

SHORTEST_S: Final = 1e-3
"""A training time below this is not measured but rounded away."""

STALE_STEPS: Final = 3.0
"""Measurements are not too old before that many steps of the last one's length, however long that is."""

STICKINESS: Final = 3.0
"""A fleet shrinks only where engines gain less than LEAST_STEP_GAIN divided by 1 + this x tolerance: no fit is exact,
and what just paid must not be given back for its error."""


@dataclass(frozen=True)
class StepMeasurement:
    """Times of one finished step, in seconds."""

    step: int
    engines: float
    """Rollouts that generated for it, on average over its time."""
    rollout_s: float
    train_s: float
    step_s: float
    reserved_s: float = 0.0
    """Time in which the reserved engine generated."""
    steady: bool = True
    """It was watched from its start, and held neither validation nor checkpoint."""

    @property
    def seen(self) -> SeenStep | None:
        """For the fit; None where nothing generated."""
        if self.rollout_s < SHORTEST_S or self.engines * self.rollout_s + self.reserved_s <= 0:
            return None
        return SeenStep(self.engines + self.reserved_s / self.rollout_s, self.rollout_s)


@dataclass(frozen=True)
class Sizing:
    """What a step's measurement led to."""

    desired_replicas: int
    """Rollouts from now on."""
    recommended: int
    """What the step alone asks for, before windows and bounds."""
    window: tuple[Recommendation, ...]
    why: str
    """The decision with its numbers."""
    changed: bool = False
    seen: tuple[SeenStep, ...] = ()
    """Steps to fit the next one with."""


def clamp(spec: JobSpec, desired: int) -> int:
    """Within minReplicas and maxReplicas."""
    return max(spec.rollout.min_replicas, min(desired, spec.rollout.max_replicas))


def sizing(
    spec: JobSpec,
    measurement: StepMeasurement,
    current: int,
    window: tuple[Recommendation, ...],
    cooled: bool,
    num_on_demand: int,
    seen: tuple[SeenStep, ...] = (),
) -> Sizing:
    """After one finished step. `cooled`: the last change is longer ago than the cooldown; `num_on_demand`: rollouts
    now on-demand, for the budget; `seen`: steps before."""
    prefix = _describe(measurement)
    if not measurement.steady:
        why = f"{prefix}; not measured, because it was no ordinary step"
        return Sizing(current, current, window=window, why=why, seen=seen)
    gap = (measurement.rollout_s - measurement.train_s) / max(measurement.step_s, SHORTEST_S)
    seen = seen if measurement.seen is None else keep_step(seen, measurement.seen)
    asked = current if _within(spec, gap) else recommend(spec, measurement, num_on_demand, seen, current)
    rule = spec.scaling.gap
    longest = max(rule.scale_up_window_steps, rule.scale_down_window_steps)
    window = (*window, Recommendation(measurement.step, asked))[-longest:]
    desired = _steadied(spec, current, window)
    if desired == current:
        return Sizing(current, asked, window=window, why=f"{prefix}: asks for {asked}, stays at {current}", seen=seen)
    if not cooled:
        pause = f"until {rule.cooldown_seconds} s after the last change"
        why = f"{prefix}: asks for {asked}, stays at {current} {pause}"
        return Sizing(current, asked, window=window, why=why, seen=seen)
    why = f"{prefix}: asks for {asked}, {current} -> {desired}"
    return Sizing(desired, asked, window=window, why=why, changed=True, seen=seen)


def recommend(
    spec: JobSpec,
    measurement: StepMeasurement,
    num_on_demand: int,
    seen: tuple[SeenStep, ...] = (),
    current: int = 0,
) -> int:
    """Rollouts that the objective asks for, before bounds; no fewer than `current` unless fewer surely do."""
    newest = measurement.seen
    model = StepModel(0.0, 0.0) if newest is None else fit_steps(seen or (newest,)).through(newest)
    rest_s = max(0.0, measurement.step_s - max(measurement.rollout_s, measurement.train_s))
    enough = model.wanted(measurement.train_s, rest_s)
    if enough < current and spec.scaling.objective is not Objective.COST:
        least = LEAST_STEP_GAIN / (1 + STICKINESS * spec.scaling.gap.tolerance_percent / 100)
        enough = max(enough, min(current, model.wanted(measurement.train_s, rest_s, least)))
    match spec.scaling.objective:
        case Objective.THROUGHPUT:
            return enough
        case Objective.THROUGHPUT_UNDER_BUDGET:
            return affordable(spec, enough, num_on_demand)
        case Objective.COST:
            choices = range(spec.rollout.min_replicas, clamp(spec, enough) + 1)
            return min(choices, key=lambda n: (_cost(spec, measurement, model, n), n))


def hourly(spec: JobSpec, rollouts: int, num_on_demand: int = 0) -> float:
    """Price of a fleet for an hour; at least `num_on_demand` of them, and baseOnDemand, at the on-demand price."""
    spot, on_demand = spec.pricing.spot_per_hour or 0.0, spec.pricing.on_demand_per_hour or 0.0
    if spec.rollout.capacity.policy is CapacityPolicy.ON_DEMAND:
        return rollouts * on_demand
    costly = min(rollouts, max(num_on_demand, spec.rollout.capacity.base_on_demand))
    return costly * on_demand + (rollouts - costly) * spot


def _describe(measurement: StepMeasurement) -> str:
    gap = 100 * (measurement.rollout_s - measurement.train_s) / max(measurement.step_s, SHORTEST_S)
    return (
        f"step {measurement.step}: {measurement.engines:.3g} rollouts generated for {measurement.rollout_s:.1f} s,"
        f" training took {measurement.train_s:.1f} s of {measurement.step_s:.1f} s, gap {gap:.0f} %"
    )


def _within(spec: JobSpec, gap: float) -> bool:
    """The dead band is about keeping pace; with objective Cost the cheapest fleet need not keep pace."""
    return spec.scaling.objective is not Objective.COST and abs(gap) * 100 <= spec.scaling.gap.tolerance_percent


def _steadied(spec: JobSpec, current: int, window: tuple[Recommendation, ...]) -> int:
    rule = spec.scaling.gap
    sizes = [one.replicas for one in window]
    ups, downs = sizes[-rule.scale_up_window_steps :], sizes[-rule.scale_down_window_steps :]
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


def _cost(spec: JobSpec, measurement: StepMeasurement, model: StepModel, rollouts: int) -> float:
    """Cost of one step with that many rollouts, in pricing.currency."""
    rest = max(0.0, measurement.step_s - max(measurement.rollout_s, measurement.train_s))
    paced = max(measurement.train_s, model.seconds(rollouts)) if rollouts else measurement.train_s + model.seconds(1)
    if rollouts == 0 and not spec.trainer.reserved_engine:
        return math.inf
    return (paced + rest) * ((spec.pricing.reserved_per_hour or 0.0) + hourly(spec, rollouts)) / 3600


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
    window: tuple[Recommendation, ...] = ()
    """To be remembered."""
    seen: tuple[SeenStep, ...] = ()
    """To be remembered."""
    changed: str = ""
    """The decision as a sentence, in the reconcile that changes the number."""


def scale_decision(ctx: ReconcileContext, fleet: Sequence[RolloutPod], step: StepObservation) -> ScaleDecision:
    """How many rollouts a running job should have, and why; whoever decides, no more than the budget pays for."""
    decision = _decided(ctx, fleet, step)
    seen = ctx.state.seen if step.measurement is None else decision.seen
    return replace(decision, desired_replicas=affordable(ctx.spec, decision.desired_replicas), seen=seen)


def _decided(ctx: ReconcileContext, fleet: Sequence[RolloutPod], step: StepObservation) -> ScaleDecision:
    stored, window, mode = ctx.status.scaling, ctx.state.recommendations, ctx.spec.scaling.mode
    if not ctx.wants_rollouts:
        return _not_measured(ctx, 0, ScalingReason.NOT_WANTED, "this mode samples nothing to train on")
    if mode is not ScalingMode.GAP:
        who = "an autoscaler" if mode is ScalingMode.EXTERNAL else "the user"
        return _not_measured(
            ctx, num_rollouts(ctx.spec), ScalingReason(mode.value), f"{who} decides on the number of rollouts"
        )
    begun = ctx.status.start_time is not None
    current = clamp(ctx.spec, ctx.status.rollout.desired_replicas) if begun else num_rollouts(ctx.spec)
    if step.measurement is not None:
        return _measured(ctx, fleet, step.measurement, current)
    last = unix(stored.last_step_time)
    if last is None:
        return replace(
            _not_measured(ctx, current, ScalingReason.WARM_UP, "no step has been measured yet"), window=window
        )
    limit = _stale_after_s(ctx)
    if ctx.now - last > limit:
        message = f"no step has been measured for more than {limit:.0f} s, so the number stays"
        # What was seen is as true as before: the next step goes on from it.
        return replace(_not_measured(ctx, current, ScalingReason.METRICS_STALE, message), window=window)
    return ScaleDecision(
        current, stored, active=True, reason=ScalingReason.MEASURED, message=FOLLOWS_GAP, window=window
    )


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
    ctx: ReconcileContext, fleet: Sequence[RolloutPod], measurement: StepMeasurement, current: int
) -> ScaleDecision:
    stored = ctx.status.scaling
    scaled_at = unix(stored.last_scale_time)
    cooled = scaled_at is None or ctx.now - scaled_at >= ctx.spec.scaling.gap.cooldown_seconds
    num_on_demand = len(of_pool(fleet, Pool.ON_DEMAND))
    sized = sizing(ctx.spec, measurement, current, ctx.state.recommendations, cooled, num_on_demand, ctx.state.seen)
    update = {
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
    scaling = stored.model_copy(update=update)
    decision = ScaleDecision(
        sized.desired_replicas, scaling, active=True, reason=ScalingReason.MEASURED, message=FOLLOWS_GAP
    )
    return replace(decision, window=sized.window, seen=sized.seen, changed=sized.why if sized.changed else "")


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
        return StepObservation(
            StepWatch(reported.step, serving, whole=False, at=ctx.now), boundary=not reported.trainer_connected
        )
    if reported.step == last.step:
        return StepObservation(last.until(ctx.now, serving), boundary=not reported.trainer_connected)
    begun = StepWatch(reported.step, serving, whole=reported.step > last.step, at=ctx.now)
    return StepObservation(begun, _finished_step(ctx, last.until(ctx.now, serving)), boundary=True)


def _finished_step(ctx: ReconcileContext, last: StepWatch) -> StepMeasurement | None:
    values = ctx.manager_status.values if ctx.manager_status is not None else {}
    if ctx.manager_status is None or ctx.manager_status.step < last.step or not values.keys() >= NEEDED:
        return None
    engines = last.mean_engines
    alone = engines == 0 and ctx.spec.trainer.reserved_engine
    return StepMeasurement(
        step=ctx.manager_status.step,
        engines=engines,
        rollout_s=values[StepValue.ROLLOUT_SECONDS],
        train_s=values[StepValue.TRAIN_SECONDS],
        step_s=values[StepValue.STEP_SECONDS],
        reserved_s=values.get(StepValue.RESERVED_SECONDS, values[StepValue.ROLLOUT_SECONDS] if alone else 0.0),
        steady=last.whole and values.get(StepValue.POLLUTED_STEP, 0.0) < 0.5,
    )
