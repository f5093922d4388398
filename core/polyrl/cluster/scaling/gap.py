"""What finished steps ask for: so many rollouts that generation keeps pace with training, steadied against noise.

Generation by n engines takes a + b / n seconds, fitted to the steps that were seen (`step_model`). Training takes T
seconds beside it (`beside`); no pace is kept with what waits for the whole step:

    Throughput                the least n' with a + b / n' <= T: more engines would wait for the trainer, fewer make the
                              trainer wait; but none whose gain is below LEAST_STEP_GAIN
    ThroughputUnderBudget     the same, and whoever decides, never more than budgetPerHour pays for
    Cost                      the n' for which step time x hourly price is least; step time is max(T, a + b / n') plus
                              what is neither, and with n' = 0 it is T plus a + b on the reserved engine. Without
                              pricing.reservedPerHour only rollouts cost money, and the answer is min

A rollout counts as much as the reserved engine, for the seconds in which that may generate; engines that came or went
during a step count for the time that they were there. The manager has integrated that, and keeps it
(`status.FinishedStep`); what steps asked for is in the job's status. So nothing hangs on this process: one that starts
anew goes on with the steps that ended meanwhile, and counts none twice.
Not measured: a trainer's first step, in which engines still started, and what an earlier one left. What a step takes
is the median of the newest few.
Then: within the dead band nothing grows, and only what does not pay shrinks; the band is wider for who would turn
round, since a fleet at its edge would follow the noise to and fro; up by the least of the window, down by the most;
each bounded per step; none within the cooldown; always within minReplicas and maxReplicas. "Now" is the desired number,
which counts rollouts that are still starting or that capacity withholds, so that a slow start is not answered with more
of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import Final

from msgspec.structs import replace

from polyrl.cluster.scaling.prices import affordable, hourly
from polyrl.cluster.scaling.step_model import (
    LEAST_STEP_GAIN,
    SHORTEST_S,
    USUAL_STEPS,
    StepModel,
    fit_steps,
    is_measure,
    measures,
)
from polyrl.manifest.parts.algorithm import OldLogProbs
from polyrl.manifest.scaling import Objective
from polyrl.manifest.spec import JobSpec
from polyrl.status import FinishedStep

STICKINESS: Final = 3.0
"""A fleet shrinks only where engines gain less than LEAST_STEP_GAIN divided by 1 + this x tolerance: no fit is exact,
and what just paid must not be given back for its error. After its first change it grows only where they gain more than
LEAST_STEP_GAIN times 1 + tolerance, and then as far as it pays at all."""

TURNING: Final = 1.5
"""The dead band is so much wider for a change against the direction of the last one. Where steps differ by 8 % by
chance, one fleet in seventeen went to and fro without it and without what STICKINESS says of growing. What became
longer or shorter for good is answered a little later instead."""

LEAST_SAVING: Final = 0.03
"""With objective Cost a change must save so much of a step's price, TURNING times it where it turns round: sizes near
the cheapest cost hardly more, and by each step's noise another one of them is the cheapest."""


@dataclass(frozen=True)
class FleetSize:
    """Rollouts before a decision."""

    rollouts: int
    last_change: int = 0
    """By how many the newest change raised their number; 0: there was none."""
    num_on_demand: int = 0
    """On-demand rollouts that exist now, for the budget."""
    cooled: bool = True
    """The newest change is longer ago than the cooldown."""


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
    spec: JobSpec, steps: Sequence[FinishedStep], last: int, window: tuple[int, ...], fleet: FleetSize
) -> Sizing:
    """After finished `steps`, of which those after step `last` are new. `window`: what those before asked for."""
    newest, rule, current, part = steps[-1], spec.scaling.gap, fleet.rollouts, beside(spec)
    usual = cache(lambda count: as_usual(steps[:count], part))
    prefix = _describe(newest, usual(len(steps))[0] if is_measure(newest) else newest, part)
    asked = current
    new = new_steps(steps, last)
    for place, step in enumerate(steps):
        if step.steady and step in new:
            asked = _asked(spec, *usual(place + 1), fleet) if is_measure(step) else current
            window = (*window, asked)[-max(rule.scale_up_window_steps, rule.scale_down_window_steps) :]
    if not newest.steady:
        return Sizing(current, asked, window=window, why=f"{prefix}; not measured, because it was no ordinary step")
    desired = _steadied(spec, current, window)
    if desired == current:
        return Sizing(current, asked, window=window, why=f"{prefix}: asks for {asked}, stays at {current}")
    if not fleet.cooled:
        pause = f"until {rule.cooldown_seconds} s after the last change"
        return Sizing(current, asked, window=window, why=f"{prefix}: asks for {asked}, stays at {current} {pause}")
    return Sizing(
        desired, asked, window=window, why=f"{prefix}: asks for {asked}, {current} -> {desired}", changed=True
    )


def new_steps(steps: Sequence[FinishedStep], last: int) -> Sequence[FinishedStep]:
    """Steps after step `last`. A trainer that went back to a checkpoint does steps again; a newest step before `last`
    shows that."""
    if not steps or steps[-1].step == last:
        return ()
    return [step for step in steps if step.step > last] or steps[-1:]


def _asked(spec: JobSpec, usual: FinishedStep, model: StepModel, fleet: FleetSize) -> int:
    """The dead band is about keeping pace, and about the whole fleet: a rollout that was lost for half a step comes
    back by itself. Who surely gains nothing leaves there as well: a tail that takes as long as training is within it
    with any fleet. With objective Cost the cheapest fleet need not keep pace."""
    current, rule = fleet.rollouts, spec.scaling.gap
    gap = _gap(usual, model.seconds(max(usual.engines, current)))
    band = rule.tolerance_percent * (TURNING if gap * fleet.last_change < 0 else 1)
    if abs(gap) <= band and spec.scaling.objective is not Objective.COST:
        return min(current, model.wanted(0.0, _rest(usual), _sure_loss(spec)))
    return recommend(spec, usual, model, fleet)


def beside(spec: JobSpec) -> float:
    """Part of training that engines generate beside: what they are to keep pace with. Of a step that is learned as
    it comes it is the first pass; of one that is learned as a whole nothing, unless they are a step ahead."""
    algorithm = spec.recipe.algorithm
    if algorithm is None or algorithm.max_staleness > 0:
        return 1.0
    return 0.0 if algorithm.old_log_probs is OldLogProbs.RECOMPUTE else 1 / algorithm.update_epochs


def as_usual(steps: Sequence[FinishedStep], part: float = 1.0) -> tuple[FinishedStep, StepModel]:
    """The newest step, a measure, as if it took what most of the last ones did, and the curve through it; its training
    is that `part`, and what is left of it is neither that nor generating."""
    seen = [replace(one, train_seconds=part * one.train_seconds) for one in measures(steps)]
    newest, few = seen[-1], seen[-USUAL_STEPS:]
    model = fit_steps(seen).through(*few)
    rollout_s, train_s = model.seconds(newest.engines), median(step.train_seconds for step in few)
    step_s = max(rollout_s, train_s) + median(_rest(step) for step in few)
    return replace(newest, rollout_seconds=rollout_s, train_seconds=train_s, step_seconds=step_s), model


def recommend(spec: JobSpec, usual: FinishedStep, model: StepModel, fleet: FleetSize) -> int:
    """Rollouts that the objective asks for, before bounds."""
    match spec.scaling.objective:
        case Objective.THROUGHPUT:
            return _keeping_pace(spec, usual, model, fleet)
        case Objective.THROUGHPUT_UNDER_BUDGET:
            return affordable(spec, _keeping_pace(spec, usual, model, fleet), fleet.num_on_demand)
        case Objective.COST:
            return _cheapest(spec, usual, model, fleet)


def _keeping_pace(spec: JobSpec, usual: FinishedStep, model: StepModel, fleet: FleetSize) -> int:
    """As many as pay; so many as there are where it is not sure that more do, or that fewer would."""
    wanted = partial(model.wanted, usual.train_seconds, _rest(usual))
    doubt = spec.scaling.gap.tolerance_percent / 100 if fleet.last_change else 0.0
    if wanted(LEAST_STEP_GAIN * (1 + doubt)) > fleet.rollouts:
        return wanted()
    return min(fleet.rollouts, wanted(_sure_loss(spec)))


def _sure_loss(spec: JobSpec) -> float:
    """What is gained less by surely does not pay."""
    return LEAST_STEP_GAIN / (1 + STICKINESS * spec.scaling.gap.tolerance_percent / 100)


def _rest(step: FinishedStep) -> float:
    """Seconds of it that are neither generating nor the training beside that."""
    return max(0.0, step.step_seconds - max(step.rollout_seconds, step.train_seconds))


def _gap(step: FinishedStep, rollout_s: float) -> float:
    """In per cent of the step."""
    return 100 * (rollout_s - step.train_seconds) / max(step.step_seconds, SHORTEST_S)


def _describe(newest: FinishedStep, usual: FinishedStep, part: float) -> str:
    counts = "" if part == 1 else f", with {part:.0%} of training, which runs beside generation"
    return (
        f"step {newest.step}: {newest.engines:.3g} engines generated for {newest.rollout_seconds:.1f} s, training took"
        f" {newest.train_seconds:.1f} s of {newest.step_seconds:.1f} s, one engine more would have saved"
        f" {newest.next_engine_saves_seconds:.1f} s, gap as usual lately"
        f" {_gap(usual, usual.rollout_seconds):.0f} %{counts}"
    )


def _steadied(spec: JobSpec, current: int, window: tuple[int, ...]) -> int:
    rule = spec.scaling.gap
    ups, downs = window[-rule.scale_up_window_steps :], window[-rule.scale_down_window_steps :]
    if len(ups) == rule.scale_up_window_steps and min(ups) > current:
        return clamp(spec, min(min(ups), current + rule.max_scale_up_per_step))
    if len(downs) == rule.scale_down_window_steps and max(downs) < current:
        return clamp(spec, max(max(downs), current - rule.max_scale_down_per_step))
    return current


def _cheapest(spec: JobSpec, usual: FinishedStep, model: StepModel, fleet: FleetSize) -> int:
    """The size at which a step costs least; that of now where no other saves enough."""
    cost = partial(_cost, spec, usual, model)
    most = clamp(spec, model.wanted(usual.train_seconds, _rest(usual)))
    found = min(range(spec.rollout.min_replicas, most + 1), key=lambda n: (cost(n), n))
    turns = (found - fleet.rollouts) * fleet.last_change < 0
    saves_too_little = cost(found) > cost(fleet.rollouts) * (1 - LEAST_SAVING * (TURNING if turns else 1))
    return fleet.rollouts if saves_too_little else found


def _cost(spec: JobSpec, step: FinishedStep, model: StepModel, rollouts: int) -> float:
    """Cost of one step with that many rollouts, in pricing.currency."""
    train_s = step.train_seconds
    paced = max(train_s, model.seconds(rollouts)) if rollouts else train_s + model.seconds(1)
    if rollouts == 0 and not spec.trainer.reserved_engine:
        return math.inf
    return (paced + _rest(step)) * ((spec.pricing.reserved_per_hour or 0.0) + hourly(spec, rollouts)) / 3600
