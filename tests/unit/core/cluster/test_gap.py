"""Desired size from measured steps: numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from polyrl.cluster.scaling.gap import FleetSize, Sizing, as_usual, new_steps, recommend, sizing
from polyrl.cluster.scaling.prices import hourly
from polyrl.manifest.job import JobSpec, PolyRLJob
from polyrl.status import MAX_MEASURE, FinishedStep

PRICES = {"spotPerHour": 1.0, "onDemandPerHour": 3.0, "reservedPerHour": 10.0}


@pytest.fixture
def measured(build: Any) -> Callable[..., list[FinishedStep]]:
    """Step 7, the only one; `reserved_s`: in these seconds the reserved engine generated as well."""

    def steps(
        engines: float, rollout_s: float, train_s: float, reserved_s: float = 0.0, **more: Any
    ) -> list[FinishedStep]:
        engines += reserved_s / rollout_s if rollout_s else 0.0
        return [build.step(7, engines, rollout_s=rollout_s, train_s=train_s, **more)]

    return steps


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        pytest.param((4, 30.0, 20.0, 0.0), 6, id="120 engine-seconds at the pace of 20 s"),
        pytest.param((4, 10.0, 20.0, 0.0), 2, id="training is slower"),
        pytest.param((4, 30.0, 20.0, 10.0), 7, id="130 / 20 = 6.5"),
        pytest.param((0, 40.0, 20.0, 40.0), 2, id="the reserved engine did it all"),
        pytest.param((3, 20.0, 20.0, 0.0), 3, id="they keep pace"),
        pytest.param((2, 50.0, 0.0, 0.0), 400, id="no training at all: until 100 / n is a fifth of the step"),
    ],
)
def test_throughput(build: Any, measured: Any, times: tuple[int, float, float, float], expected: int) -> None:
    """`times`: engines, rollout, training and reserved seconds."""
    spec = build.job({"maxReplicas": 100}).spec
    assert recommend(spec, *as_usual(measured(*times)), FleetSize(0)) == expected


@pytest.mark.parametrize(
    ("budget", "base", "num_on_demand", "expected"),
    [
        pytest.param(6.0, 0, 0, 6, id="enough for all"),
        pytest.param(4.5, 0, 0, 4, id="for four"),
        pytest.param(4.5, 1, 0, 2, id="the base costs more"),
        pytest.param(4.5, 0, 1, 2, id="what is on-demand costs more"),
        pytest.param(0.0, 0, 0, 0, id="nothing"),
        pytest.param(100.0, 0, 0, 6, id="more than enough"),
    ],
)
def test_budget(build: Any, measured: Any, budget: float, base: int, num_on_demand: int, expected: int) -> None:
    scaling = {"objective": "ThroughputUnderBudget", "budgetPerHour": budget}
    capacity = {"baseOnDemand": base}
    spec = build.job({"maxReplicas": 100, "capacity": capacity}, scaling=scaling, pricing=PRICES).spec
    assert recommend(spec, *as_usual(measured(4, 30.0, 20.0)), FleetSize(0, num_on_demand=num_on_demand)) == expected
    assert expected == 0 or hourly(spec, expected, num_on_demand) <= budget


@pytest.mark.parametrize(
    ("reserved", "expected"),
    [pytest.param(100.0, 6, id="the trainer costs most"), pytest.param(0.0, 0, id="only rollouts cost")],
)
def test_cost(build: Any, measured: Any, reserved: float, expected: int) -> None:
    """An expensive trainer must not wait; one that costs nothing may take all the time."""
    spec = build.job(
        {"maxReplicas": 100}, scaling={"objective": "Cost"}, pricing=PRICES | {"reservedPerHour": reserved}
    ).spec
    assert recommend(spec, *as_usual(measured(4, 30.0, 20.0)), FleetSize(0)) == expected


def test_cost_weighs_both(build: Any, measured: Any) -> None:
    """With W = 120, T = 20, rest 1: 3 cost 41 s x 13 = 533, 6 cost 21 s x 16 = 336, and 5 cost 25 s x 15 = 375."""
    spec = build.job({"maxReplicas": 100}, scaling={"objective": "Cost"}, pricing=PRICES).spec
    assert recommend(spec, *as_usual(measured(4, 30.0, 20.0)), FleetSize(0)) == 6


GAP = {"tolerancePercent": 10, "scaleUpWindowSteps": 2, "scaleDownWindowSteps": 3}


def decide(build: Any, spec: JobSpec, sizes: list[int], current: int, *, cooled: bool = True) -> Sizing:
    """`sizes` asked for by consecutive steps, the last of which is decided on now (with 20 s of training)."""
    step = build.step(7, 4, rollout_s=sizes[-1] * 5.0, train_s=20.0)
    return sizing(spec, [step], 6, tuple(sizes[:-1]), FleetSize(current, cooled=cooled))


@pytest.mark.parametrize(
    ("sizes", "current", "expected"),
    [
        pytest.param([8], 4, 4, id="the up window is two steps"),
        pytest.param([8, 8], 4, 7, id="three at a time"),
        pytest.param([6, 8], 4, 6, id="the least of the window"),
        pytest.param([8, 5], 4, 5, id="the last one hardly more"),
        pytest.param([8, 3], 4, 4, id="they disagree"),
        pytest.param([1, 1], 4, 4, id="the down window is three steps"),
        pytest.param([1, 1, 1], 4, 3, id="one at a time"),
        pytest.param([3, 1, 1], 4, 3, id="the most of three"),
        pytest.param([4, 1, 1], 4, 4, id="the most of the window"),
        pytest.param([20, 20], 9, 10, id="maxReplicas"),
        pytest.param([1, 1, 1], 2, 2, id="minReplicas"),
    ],
)
def test_windows_and_bounds(build: Any, sizes: list[int], current: int, expected: int) -> None:
    spec = build.job({"minReplicas": 2, "maxReplicas": 10}, scaling={"gap": GAP | {"maxScaleUpPerStep": 3}}).spec
    sized = decide(build, spec, sizes, current)
    assert (sized.desired_replicas, sized.changed) == (expected, expected != current)
    assert sized.recommended == sizes[-1]


def test_dead_band_asks_for_what_is(build: Any, measured: Any) -> None:
    spec = build.job(scaling={"gap": GAP | {"scaleUpWindowSteps": 1}}).spec
    near = sizing(spec, measured(4, 22.0, 20.0, step_seconds=30.0), 6, (), FleetSize(4))
    beyond = sizing(spec, measured(4, 24.0, 20.0, step_seconds=30.0), 6, (), FleetSize(4))
    assert (near.desired_replicas, beyond.desired_replicas) == (4, 5)


@pytest.mark.parametrize(
    ("rollout_s", "step_s", "last_change", "expected"),
    [
        pytest.param(24.0, 30.0, 1, 5, id="13 % longer, and it grew last"),
        pytest.param(24.0, 30.0, -1, 4, id="13 % longer, and it shrank last"),
        pytest.param(24.0, 20.0, -1, 5, id="20 % longer, and it shrank last"),
        pytest.param(14.0, 46.0, -1, 3, id="13 % shorter, and it shrank last"),
        pytest.param(14.0, 46.0, 1, 4, id="13 % shorter, and it grew last"),
        pytest.param(14.0, 30.0, 1, 3, id="20 % shorter, and it grew last"),
    ],
)
def test_who_turns_round_has_a_wider_dead_band(
    build: Any, measured: Any, rollout_s: float, step_s: float, last_change: int, expected: int
) -> None:
    spec = build.job(scaling={"gap": GAP | {"scaleUpWindowSteps": 1, "scaleDownWindowSteps": 1}}).spec
    steps = measured(4, rollout_s, 20.0, step_seconds=step_s)
    assert sizing(spec, steps, 6, (), FleetSize(4, last_change=last_change)).desired_replicas == expected


@pytest.mark.parametrize(
    ("current", "last_change", "expected"),
    [
        pytest.param(14, 0, 16, id="of no change yet it grows to what pays"),
        pytest.param(12, 4, 16, id="later where it surely pays, and as far"),
        pytest.param(15, 4, 15, id="not where that is in doubt"),
        pytest.param(20, 4, 20, id="nor does it shrink where that is in doubt"),
        pytest.param(40, 4, 22, id="but where it surely does not pay"),
    ],
)
def test_of_sizes_that_pay_alike_the_one_there_is_stays(
    build: Any, measured: Any, current: int, last_change: int, expected: int
) -> None:
    """A tail of 59 s, 240 s of work, rest of 1 s: 16 pay, 14 surely do, more than 22 surely do not."""
    spec = build.job({"maxReplicas": 100}).spec
    steps = measured(16, 59.0 + 240.0 / 16, 20.0, shared_s=240.0)
    assert recommend(spec, *as_usual(steps), FleetSize(current, last_change=last_change)) == expected


@pytest.mark.parametrize(
    ("current", "last_change", "expected"),
    [
        pytest.param(6, 0, 6, id="the cheapest"),
        pytest.param(4, 0, 6, id="what saves enough"),
        pytest.param(4, -1, 6, id="also where it turns round"),
        pytest.param(7, 0, 6, id="3.7 % are enough"),
        pytest.param(7, 1, 7, id="not where it turns round"),
    ],
)
def test_for_the_price_alone_a_change_must_save_enough(
    build: Any, measured: Any, current: int, last_change: int, expected: int
) -> None:
    """6 cost 21 s x 26 = 546, 4 cost 31 s x 24 = 744, 7 cost 21 s x 27 = 567."""
    prices = PRICES | {"reservedPerHour": 20.0}
    spec = build.job({"maxReplicas": 100}, scaling={"objective": "Cost"}, pricing=prices).spec
    assert recommend(spec, *as_usual(measured(4, 30.0, 20.0)), FleetSize(current, last_change=last_change)) == expected


def test_cooldown_holds_and_the_window_is_kept(build: Any) -> None:
    spec = build.job(scaling={"gap": GAP}).spec
    held = decide(build, spec, [6, 6], 4, cooled=False)
    assert (held.desired_replicas, len(held.window)) == (4, 2)
    assert "120 s" in held.why
    assert len(decide(build, spec, [6, 6], 4).window) == 2, "the limits per step hold in a row, too"


def test_unsteady_step_moves_nothing(build: Any, measured: Any) -> None:
    spec = build.job(scaling={"gap": GAP}).spec
    sized = sizing(spec, measured(4, 60.0, 20.0, steady=False), 6, (6,), FleetSize(4))
    assert (sized.desired_replicas, sized.window, sized.changed) == (4, (6,), False)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param({"engines": 0.0, "rollout_s": 600.0}, id="without an engine it took ten minutes"),
        pytest.param({"engines": 4.0, "rollout_s": 0.0}, id="all was generated before"),
    ],
)
def test_a_step_that_measures_no_engines_asks_for_what_is(build: Any, measured: Any, step: dict[str, float]) -> None:
    """It asked for none, and three of them took a rollout away from a fleet that had lost all."""
    spec = build.job(scaling={"gap": GAP | {"scaleDownWindowSteps": 1}}).spec
    sized = sizing(spec, measured(train_s=20.0, **step), 6, (), FleetSize(4))
    assert (sized.recommended, sized.desired_replicas) == (4, 4)


def test_decision_states_its_numbers(build: Any, measured: Any) -> None:
    spec = build.job(scaling={"gap": GAP | {"scaleUpWindowSteps": 1}}).spec
    assert sizing(spec, measured(4, 30.0, 20.0), 6, (), FleetSize(4)).why == (
        "step 7: 4 engines generated for 30.0 s, training took 20.0 s of 31.0 s, one engine more would have saved"
        " 6.0 s, gap as usual lately 32 %: asks for 6, 4 -> 6"
    )


def test_the_gap_that_a_decision_states_is_the_one_it_is_made_by(build: Any) -> None:
    """One step with a very long answer asks for nothing, and says why."""
    steps = [build.step(n, 4, rollout_s=200.0 if n == 7 else 20.0, train_s=20.0) for n in range(3, 8)]
    assert sizing(build.job().spec, steps, 6, (), FleetSize(4)).why == (
        "step 7: 4 engines generated for 200.0 s, training took 20.0 s of 201.0 s, one engine more would have saved"
        " 40.0 s, gap as usual lately 0 %: asks for 4, stays at 4"
    )


def test_steps_that_ended_unseen_ask_each_and_one_change_is_made(build: Any) -> None:
    """An operator that was away for three steps: the window holds what each asked for, and no step asks twice."""
    gap = {"scaleUpWindowSteps": 3, "maxScaleUpPerStep": 2}
    spec = build.job({"maxReplicas": 64}, scaling={"gap": gap}).spec
    steps = [build.step(number, 4, rollout_s=60.0, train_s=20.0) for number in (5, 6, 7, 8)]
    sized = sizing(spec, steps, 5, (9,), FleetSize(4))
    assert (sized.window, sized.desired_replicas) == ((12, 12, 12), 6)
    assert sizing(spec, steps[:2], 5, (9,), FleetSize(4)).window == (9, 12)


@pytest.mark.parametrize(
    ("last", "new"),
    [
        pytest.param(0, [3, 4, 6], id="none yet"),
        pytest.param(4, [6], id="one more"),
        pytest.param(5, [6], id="the last is not kept"),
        pytest.param(6, [], id="nothing new"),
        pytest.param(9, [6], id="the trainer went back"),
    ],
)
def test_which_steps_are_new(build: Any, last: int, new: list[int]) -> None:
    steps = [build.step(number, 4, rollout_s=30.0, train_s=20.0) for number in (3, 4, 6)]
    assert [one.step for one in new_steps(steps, last)] == new
    assert new_steps([], last) == ()


def spec_of(objective: str) -> JobSpec:
    """Of 1 to 8 rollouts."""
    budget = {"budgetPerHour": 5.0} if objective == "ThroughputUnderBudget" else {}
    return PolyRLJob.model_validate(
        {
            "apiVersion": "polyrl.dev/v1alpha1",
            "kind": "PolyRLJob",
            "metadata": {"name": "j"},
            "spec": {
                "recipe": {
                    "mode": "rl",
                    "model": {"path": "/m"},
                    "data": {"rl": [{"path": "a.jsonl"}]},
                    "reward": {"function": "r:s"},
                    "algorithm": {"steps": 1},
                },
                "rollout": {"minReplicas": 1, "maxReplicas": 8},
                "scaling": {"objective": objective, **budget},
                "pricing": PRICES,
            },
        }
    ).spec


def seen_step(number: int, measures: tuple[float, ...]) -> FinishedStep:
    """By its engines and the seconds of its rollout, training and whole, and of all engines that shared in it."""
    engines, rollout_s, train_s, step_s, shared_s = measures
    return FinishedStep(
        step=number,
        engines=engines,
        rollout_seconds=rollout_s,
        train_seconds=train_s,
        step_seconds=step_s,
        busy_engine_seconds=shared_s,
        shared_engine_seconds=shared_s,
        evaluation_engine_seconds=0.0,
        next_engine_saves_seconds=0.0,
        steady=True,
    )


@given(
    engines=st.integers(0, 50),
    times=st.tuples(*[st.floats(0, 1e4, allow_nan=False)] * 4),
    current=st.integers(0, 1024),
    objective=st.sampled_from(["Throughput", "Cost", "ThroughputUnderBudget"]),
)
def test_any_measurement_gives_a_size_within_bounds(
    engines: int, times: tuple[float, float, float, float], current: int, objective: str
) -> None:
    spec = spec_of(objective)
    step = seen_step(1, (engines, *times))
    start = max(1, min(current, 8))
    sized = sizing(spec, [step], 0, (), FleetSize(start))
    assert 1 <= sized.desired_replicas <= 8
    assert -1 <= sized.desired_replicas - start <= 4
    assert sized.why


MEASURE = st.sampled_from([-MAX_MEASURE, -5.0, 0.0, 1e-9, 1e-3, 1.0, 60.0, 1e6, MAX_MEASURE])


@given(steps=st.lists(st.tuples(*[MEASURE] * 5), min_size=1, max_size=6), last_change=st.integers(-3, 3))
def test_no_history_that_a_manager_may_send_ends_the_decision(steps: list[tuple[float, ...]], last_change: int) -> None:
    for objective in ("Throughput", "Cost"):
        seen = [seen_step(number, step) for number, step in enumerate(steps)]
        sized = sizing(spec_of(objective), seen, -1, (), FleetSize(4, last_change=last_change))
        assert 1 <= sized.desired_replicas <= 8
