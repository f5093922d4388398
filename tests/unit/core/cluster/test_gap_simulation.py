"""The gap rule on virtual fleets: step time a + b / n with noise and losses, twenty shapes of the tail."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import pytest

from polyrl.cluster.scaling.decision import scale_decision
from polyrl.cluster.scaling.gap import FleetSize, sizing
from polyrl.cluster.scaling.prices import affordable_on_demand, hourly
from polyrl.cluster.scaling.step_model import StepModel
from polyrl.ledger.measures.usage import keep_step
from polyrl.manifest.job import JobSpec
from polyrl.status import FinishedStep
from polyrl.testing.job_values import raw_job

REST_S, TRAIN_S = 1.0, 60.0
NOISES = [0.03, 0.08]
"""Parts of a step's seconds by which prompts make it longer or shorter."""
REPORT_BIAS = 0.2
"""The manager's split of a step is wrong by up to so much in a whole run, and by half of that from step to step."""
FAST = {"maxScaleUpPerStep": 8, "maxScaleDownPerStep": 4}
SHAPES = [(fixed_s, work) for fixed_s in (0.0, 15.0, 45.0, 75.0, 150.0) for work in (240.0, 480.0, 960.0, 1920.0)]
GROWING = [(0.0, 480.0), (15.0, 480.0), (15.0, 960.0), (45.0, 240.0), (75.0, 480.0)]
SETTLED = 10
BAND = 1.15
"""Of a step by what the dead band leaves alone, a tenth of the step, and the noise of five steps' median."""
STEPS = 40


@dataclass(frozen=True)
class Event:
    """Times as much of each as in other steps, by chance or from a step on."""

    chance: float = 0.0
    lasts_from: int = 0
    tail: float = 1.0
    work: float = 1.0
    train: float = 1.0


NO_EVENT = Event()


def run(
    build: Any,
    spec: JobSpec,
    shape: StepModel,
    start: int,
    seed: int,
    noise: float = NOISES[0],
    growth: float = 0.0,
    event: Event = NO_EVENT,
    beside: float = 1.0,
) -> list[int]:
    """Sizes step by step; each step loses a rollout with 10 % and has it back half-way. `growth`: of answers, by each
    step; `beside`: part of training that runs while its step is generated."""
    draw = random.Random(seed)
    bias = draw.uniform(1 - REPORT_BIAS, 1 + REPORT_BIAS)
    window: tuple[int, ...] = ()
    steps: list[FinishedStep] = []
    current, sizes, change = start, [], 0
    for number in range(1, STEPS + 1):
        engines = max(0.5, current - 0.5 * (draw.random() < 0.1))
        hit = draw.random() < event.chance or (0 < event.lasts_from <= number)
        work = grown(shape, growth, number)
        work = StepModel(work.fixed_s * event.tail, work.shared_s * event.work) if hit else work
        rollout_s = work.seconds(engines) * draw.uniform(1 - noise, 1 + noise)
        shared_s = work.shared_s * bias * draw.uniform(1 - REPORT_BIAS / 2, 1 + REPORT_BIAS / 2)
        train_s = TRAIN_S * (event.train if hit else 1.0)
        step = build.step(
            number,
            engines,
            rollout_s=rollout_s,
            train_s=train_s,
            shared_s=min(shared_s, engines * rollout_s),
            step_seconds=max(rollout_s, beside * train_s) + (1 - beside) * train_s + REST_S,
        )
        steps = keep_step(steps, step)
        sized = sizing(spec, steps, number - 1, window, FleetSize(current, last_change=change))
        change = sized.desired_replicas - current or change
        assert -spec.scaling.gap.max_scale_down_per_step <= sized.desired_replicas - current
        assert sized.desired_replicas - current <= spec.scaling.gap.max_scale_up_per_step
        current, window = sized.desired_replicas, sized.window
        sizes.append(current)
    return sizes


def turns(sizes: list[int]) -> int:
    """How often the direction changes."""
    changes = [new - old for old, new in pairwise(sizes) if new != old]
    return sum((one > 0) != (other > 0) for one, other in pairwise(changes))


def grown(shape: StepModel, growth: float, step: int) -> StepModel:
    """Of a model whose answers are longer by then."""
    longer = 1 + growth * step
    return StepModel(shape.fixed_s * longer, shape.shared_s * longer)


def step_s(shape: StepModel, engines: int, beside: float = 1.0) -> float:
    return max(beside * TRAIN_S, shape.seconds(engines)) + (1 - beside) * TRAIN_S + REST_S


def assert_one_way(sizes: list[int]) -> None:
    assert turns(sizes) == 0, sizes


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES, ids=[f"noise of {noise:.0%}" for noise in NOISES])
@pytest.mark.parametrize("start", [4, 12])
@pytest.mark.parametrize(("fixed_s", "work"), SHAPES, ids=[f"{a:.0f} s and {b:.0f} s" for a, b in SHAPES])
def test_at_the_knee_within_ten_steps_never_away(
    build: Any, fixed_s: float, work: float, start: int, noise: float
) -> None:
    shape = StepModel(fixed_s, work)
    knee = max(1, min(64, shape.wanted(TRAIN_S, REST_S)))
    spec = build.job({"minReplicas": 1, "maxReplicas": 64}, scaling={"gap": FAST}).spec
    for seed in range(4):
        sizes = run(build, spec, shape, start, seed, noise)
        settled = sizes[SETTLED:]
        assert max(step_s(shape, n) for n in settled) <= BAND * step_s(shape, knee), (knee, sizes)
        assert 0.65 * knee <= min(settled) <= max(settled) <= 1.5 * knee + 1, (knee, sizes)
        assert_one_way(settled)


@pytest.mark.parametrize(
    ("algorithm", "beside"),
    [
        pytest.param({"oldLogProbs": "recompute"}, 0.0, id="the whole step is generated first"),
        pytest.param({"updateEpochs": 4}, 0.25, id="the first of four passes is beside generation"),
        pytest.param({"oldLogProbs": "recompute", "maxStaleness": 1}, 1.0, id="the next step is generated meanwhile"),
    ],
)
@pytest.mark.parametrize("start", [4, 24])
def test_training_that_waits_for_the_whole_step_is_kept_pace_with_by_nobody(
    build: Any, algorithm: dict[str, Any], beside: float, start: int
) -> None:
    """What is generated sooner is a shorter step then. Fleets of 24 shrank to 4, and steps took 1.6 times as long."""
    recipe = raw_job()["spec"]["recipe"]
    recipe["algorithm"] |= algorithm
    spec = build.job({"minReplicas": 1, "maxReplicas": 64}, scaling={"gap": FAST}, recipe=recipe).spec
    for seed, (fixed_s, work) in enumerate(SHAPES):
        shape = StepModel(fixed_s, work)
        knee = min(64, shape.wanted(beside * TRAIN_S, REST_S + (1 - beside) * TRAIN_S))
        settled = run(build, spec, shape, start, seed, beside=beside)[SETTLED + 5 :]
        worst = max(step_s(shape, n, beside) for n in settled)
        assert worst <= BAND * step_s(shape, max(1, knee), beside), (shape, knee, settled)
        assert max(settled) <= 1.7 * knee + 1, (shape, knee, settled)
        assert_one_way(settled)


@pytest.mark.parametrize(("growth", "most"), [(1 / 40, 1.2), (-1 / 80, 1.07)], ids=["answers double", "they halve"])
@pytest.mark.parametrize(("fixed_s", "work"), GROWING, ids=[f"{a:.0f} s and {b:.0f} s" for a, b in GROWING])
def test_a_fleet_follows_answers_that_grow(build: Any, fixed_s: float, work: float, growth: float, most: float) -> None:
    """More engines and longer steps looked as if engines did not help: fleets shrank, and steps took twice as long as
    they had to."""
    shape, spec = StepModel(fixed_s, work), build.job({"minReplicas": 1, "maxReplicas": 64}).spec
    for seed in range(6):
        sizes = run(build, spec, shape, start=8, seed=seed, noise=0.05, growth=growth)
        for number, size in enumerate(sizes[SETTLED:], SETTLED + 1):
            now = grown(shape, growth, number)
            assert step_s(now, size) <= most * step_s(now, min(64, now.wanted(TRAIN_S, REST_S))), (number, sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "most_turns"),
    [
        pytest.param(Event(0.1, tail=2.0), 4, id="tail twice as long"),
        pytest.param(Event(0.1, tail=4.0), 14, id="tail four times as long"),
        pytest.param(Event(0.1, train=0.5), 5, id="training takes half"),
    ],
)
def test_one_step_in_ten_that_is_unlike_the_others_moves_little(build: Any, event: Event, most_turns: int) -> None:
    """By single steps up to 40 of 100 fleets went to and fro, and one that shrank to a fifth took twice as long."""
    spec = build.job({"minReplicas": 1, "maxReplicas": 64}, scaling={"gap": FAST}).spec
    turned = 0
    for (fixed_s, work), start, seed in product(SHAPES, [4, 12], range(10, 12)):
        shape = StepModel(fixed_s, work)
        settled = run(build, spec, shape, start, seed, noise=0.05, event=event)[SETTLED + 5 :]
        knee = min(64, shape.wanted(TRAIN_S, REST_S))
        assert max(step_s(shape, n) for n in settled) <= 1.2 * step_s(shape, knee), (shape, start, seed, settled)
        turned += turns(settled) > 0
    assert turned <= most_turns


@pytest.mark.slow
@pytest.mark.parametrize(
    "event",
    [
        pytest.param(Event(lasts_from=20, work=3.0), id="work trebles"),
        pytest.param(Event(lasts_from=20, tail=2.0, work=2.0), id="answers double"),
        pytest.param(Event(lasts_from=20, tail=0.5, work=0.5), id="they halve"),
    ],
)
def test_another_curriculum_is_another_model(build: Any, event: Event) -> None:
    """With all steps ever seen in the fit, more engines and longer steps looked as if engines did not help."""
    spec = build.job({"minReplicas": 1, "maxReplicas": 64}, scaling={"gap": FAST}).spec
    for (fixed_s, work), start, seed in product(SHAPES, [4, 12], range(10, 12)):
        now = StepModel(fixed_s * event.tail, work * event.work)
        settled = run(build, spec, StepModel(fixed_s, work), start, seed, noise=0.05, event=event)[35:]
        knee = min(64, now.wanted(TRAIN_S, REST_S))
        assert max(step_s(now, n) for n in settled) <= 1.2 * step_s(now, knee), (now, start, seed, settled)


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES, ids=[f"noise of {noise:.0%}" for noise in NOISES])
@pytest.mark.parametrize("reserved_per_hour", [10.0, 100.0], ids=["a trainer of 10", "a trainer of 100"])
@pytest.mark.parametrize(("fixed_s", "work"), SHAPES, ids=[f"{a:.0f} s and {b:.0f} s" for a, b in SHAPES])
def test_the_cheapest_fleet_is_found_and_kept(
    build: Any, fixed_s: float, work: float, reserved_per_hour: float, noise: float
) -> None:
    """With objective Cost; rollouts cost 1. By each step's noise it went to and fro in 220 of 480 runs."""
    shape, prices = (
        StepModel(fixed_s, work),
        {"spotPerHour": 1.0, "onDemandPerHour": 3.0, "reservedPerHour": reserved_per_hour},
    )
    spec = build.job(
        {"minReplicas": 1, "maxReplicas": 64}, scaling={"objective": "Cost", "gap": FAST}, pricing=prices
    ).spec
    costs = {n: step_s(shape, n) * (reserved_per_hour + n) for n in range(1, 65)}
    for start, seed in product([4, 12], range(4)):
        settled = run(build, spec, shape, start, seed, noise)[SETTLED:]
        assert max(costs[n] for n in settled) <= 1.1 * min(costs.values()), settled
        assert_one_way(settled)


@pytest.mark.parametrize(
    ("fixed_s", "work"),
    [
        pytest.param(56.0, 60.0, id="little work"),
        pytest.param(57.0, 240.0, id="more work"),
        pytest.param(58.0, 240.0, id="a longer tail"),
        pytest.param(62.0, 120.0, id="a tail longer than training"),
    ],
)
def test_rollouts_that_do_not_pay_leave_also_where_the_tail_takes_as_long_as_training(
    build: Any, fixed_s: float, work: float
) -> None:
    """With 60 s of training and 57 s of tail any fleet is within the dead band: 40 rollouts stayed, where 16 do."""
    shape = StepModel(fixed_s, work)
    knee = shape.wanted(TRAIN_S, REST_S)
    spec = build.job({"minReplicas": 1, "maxReplicas": 64}, scaling={"gap": {"maxScaleDownPerStep": 8}}).spec
    for seed in range(4):
        settled = run(build, spec, shape, start=40, seed=seed)[15:]
        assert max(settled) <= 1.7 * knee + 1, (knee, settled)
        assert all(new <= old for old, new in pairwise(settled)), "it goes one way"


def test_a_fleet_that_is_too_large_shrinks_by_the_limit_each_step(build: Any) -> None:
    spec = build.job({"minReplicas": 1, "maxReplicas": 64}, scaling={"gap": {"maxScaleDownPerStep": 2}}).spec
    window: tuple[int, ...] = ()
    steps: list[FinishedStep] = []
    current, sizes = 12, []
    for number in range(1, 8):
        step = build.step(number, current, rollout_s=2000 / current, train_s=1000.0, step_seconds=1200.0)
        steps = keep_step(steps, step)
        sized = sizing(spec, steps, number - 1, window, FleetSize(current))
        current, window = sized.desired_replicas, sized.window
        sizes.append(current)
    assert sizes == [12, 12, 10, 8, 6, 4, 2]


@pytest.mark.parametrize("mode", ["Gap", "Manual", "External"])
def test_the_budget_caps_every_mode_from_the_start_on(build: Any, mode: str) -> None:
    scaling = {"mode": mode, "objective": "ThroughputUnderBudget", "budgetPerHour": 4.5}
    prices = {"spotPerHour": 1.0, "onDemandPerHour": 3.0}
    job = build.job({"replicas": 8, "maxReplicas": 8, "capacity": {"baseOnDemand": 1}}, scaling=scaling, pricing=prices)
    desired = scale_decision(build.ctx(job), []).desired_replicas
    assert desired == 2
    assert hourly(job.spec, desired) <= 4.5 < hourly(job.spec, desired + 1)
    assert affordable_on_demand(job.spec, desired) == 1
