"""How many rollouts are desired, by whoever decides."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from polyrl.cluster.scaling.decision import between_steps, scale_decision, stale_at
from polyrl.cluster.timestamps import millisecond, second
from polyrl.manifest.status import ScalingStatus
from polyrl.status import MAX_MEASURE, FinishedStep

GAP = {"mode": "Gap", "gap": {"scaleUpWindowSteps": 1, "staleAfterSeconds": 600, "cooldownSeconds": 60}}


@pytest.mark.parametrize(
    ("spec", "status", "expected"),
    [
        pytest.param({"scaling": {"mode": "Manual"}}, {}, (3, "Manual", False), id="the user"),
        pytest.param({"scaling": {"mode": "External"}}, {}, (3, "External", False), id="an autoscaler"),
        pytest.param({"scaling": GAP}, {}, (3, "WarmUp", False), id="no step yet"),
        pytest.param({"scaling": GAP}, {"stepped": 10.0}, (5, "Measured", True), id="measured before"),
        pytest.param({"scaling": GAP}, {"stepped": 601.0}, (5, "MetricsStale", False), id="too long ago"),
    ],
)
def test_who_decides(build: Any, spec: dict[str, Any], status: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """`stepped`: seconds since the last measured step of a job that began, and desired 5."""
    stored: dict[str, Any] = {}
    if status:
        stored = {"startTime": second(build.now - 999), "rollout": {"desiredReplicas": 5}}
        stored["scaling"] = {"lastStepTime": millisecond(build.now - status["stepped"])}
    decision = scale_decision(build.ctx(build.job(**spec), stored), [])
    assert (decision.desired_replicas, decision.reason, decision.active) == expected


@pytest.mark.parametrize(("scaled_ago", "desired"), [(None, 4), (59.0, 3), (60.0, 4)], ids=["never", "cooling", "cool"])
def test_a_measured_step_moves_the_number_once_cooled(build: Any, scaled_ago: float | None, desired: int) -> None:
    scaling = {} if scaled_ago is None else {"lastScaleTime": millisecond(build.now - scaled_ago)}
    rule = GAP | {"gap": GAP["gap"] | {"maxScaleUpPerStep": 1}}  # type: ignore[operator]
    status = {"startTime": second(build.now - 999), "rollout": {"desiredReplicas": 3}, "scaling": scaling}
    steps = (build.step(7, 3, rollout_s=40.0, train_s=20.0),)
    ctx = build.ctx(build.job(scaling=rule), status, manager=build.manager(step=7, finished_steps=steps))
    decision = scale_decision(ctx, [])
    assert (decision.desired_replicas, bool(decision.changed)) == (desired, desired != 3)
    assert (decision.scaling.last_step, decision.scaling.recommended_replicas) == (7, 6)
    assert (decision.scaling.last_scale_time == millisecond(build.now)) == (desired != 3)
    assert decision.scaling.last_change == desired - 3
    assert decision.scaling.window == [6]


PRICES = {"spotPerHour": 1.0, "onDemandPerHour": 3.0}


@pytest.mark.parametrize(
    ("edited", "rollout", "desired"),
    [
        pytest.param({"objective": "ThroughputUnderBudget", "budgetPerHour": 2.0}, {}, 2, id="less budget"),
        pytest.param({}, {"maxReplicas": 3, "replicas": 3}, 3, id="a lower maxReplicas"),
        pytest.param({}, {"minReplicas": 6}, 6, id="a higher minReplicas"),
    ],
)
@pytest.mark.parametrize("stepped", [False, True], ids=["between steps", "as a step ends"])
def test_a_size_that_an_edit_changes_is_said(
    build: Any, edited: dict[str, Any], rollout: dict[str, Any], desired: int, stepped: bool
) -> None:
    """A budget that was lowered took fourteen of twenty rollouts without a word; beside a step's decision to shrink by
    one the Event named that."""
    status = {
        "startTime": second(build.now - 999),
        "rollout": {"desiredReplicas": 5},
        "scaling": {"lastStep": 6, "lastStepTime": millisecond(build.now - 9), "window": [1, 1]},
    }
    steps = (build.step(6 + stepped, 5, rollout_s=2.0, train_s=20.0),)
    manager = build.manager(step=7, finished_steps=steps)
    job = build.job(rollout, scaling=GAP | edited, pricing=PRICES)
    decision = scale_decision(build.ctx(job, status, manager=manager), [])
    assert decision.changed.startswith(f"minReplicas, maxReplicas and budgetPerHour allow {desired}: 5 -> {desired}")
    both = stepped and "maxReplicas" in rollout
    assert decision.changed.endswith(": asks for 1, 3 -> 2") == both
    assert decision.desired_replicas == desired - both


@pytest.mark.parametrize(("last_change", "desired"), [(2, 4), (-2, 3)], ids=["it grew last", "it shrank last"])
def test_which_way_the_number_went_last_is_in_the_status(build: Any, last_change: int, desired: int) -> None:
    """A step that is 12 % longer than training is within the dead band of who would turn round."""
    status = {
        "startTime": second(build.now - 999),
        "rollout": {"desiredReplicas": 3},
        "scaling": {"lastChange": last_change},
    }
    steps = (build.step(7, 3, rollout_s=23.0, train_s=20.0, step_seconds=25.0),)
    decision = scale_decision(
        build.ctx(build.job(scaling=GAP), status, manager=build.manager(step=7, finished_steps=steps)), []
    )
    assert decision.desired_replicas == desired
    assert decision.scaling.last_change == (1 if last_change > 0 else -2)


def test_a_step_is_measured_once_whoever_looks(build: Any) -> None:
    """An operator that starts anew has the status alone, and goes on from it."""
    steps = (build.step(7, 3, rollout_s=40.0, train_s=20.0),)
    job, manager = build.job(scaling=GAP), build.manager(step=7, finished_steps=steps)
    begun = {"startTime": second(build.now - 999), "rollout": {"desiredReplicas": 3}}
    first = scale_decision(build.ctx(job, begun, manager=manager), [])
    assert first.desired_replicas == 6
    after = begun | {"rollout": {"desiredReplicas": 6}, "scaling": first.scaling.model_dump(by_alias=True)}
    again = scale_decision(build.ctx(job, after, manager=manager), [])
    assert (again.desired_replicas, again.scaling, again.changed) == (6, first.scaling, "")


def test_a_manager_that_is_silent_measures_nothing(build: Any) -> None:
    steps = (build.step(7, 3, rollout_s=40.0, train_s=20.0),)
    silent = build.manager(step=7, finished_steps=steps, ago=500.0)
    assert scale_decision(build.ctx(build.job(scaling=GAP), {}, manager=silent), []).desired_replicas == 3


def test_windows_are_kept_while_nothing_is_measured(build: Any) -> None:
    job = build.job(scaling=GAP)
    stale = build.ctx(job, {"scaling": {"lastStepTime": millisecond(build.now - 601), "window": [5]}})
    assert scale_decision(stale, []).scaling.window == [5], "the next step goes on from it"
    assert stale_at(stale) == build.now - 1


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        pytest.param({"step": 4}, False, id="the same step"),
        pytest.param({"step": 5}, True, id="another one has begun"),
        pytest.param({"step": 3}, True, id="the trainer went back"),
        pytest.param({"step": 4, "trainer_connected": False}, True, id="none is under way"),
        pytest.param({"step": 5, "ago": 500.0}, False, id="the manager is silent"),
    ],
)
def test_moments_between_steps(build: Any, more: dict[str, Any], expected: bool) -> None:
    manager = build.manager(**{"trainer_connected": True} | more)
    assert between_steps(build.ctx(build.job(), {"manager": {"step": 4}}, manager=manager)) == expected
    assert not between_steps(build.ctx(build.job(), {"manager": {"step": 4}}))


EXTREMES = (0.0, -1.0, MAX_MEASURE, -MAX_MEASURE, 1e-308, 5e-324, 3.0, 1e-9, 0.5)
MEASURES = ("engines", "rollout", "train", "step", "busyEngine", "sharedEngine", "evaluationEngine", "nextEngineSaves")


def drawn_step(dice: random.Random, number: int) -> FinishedStep:
    """Anything that a manager's answer may hold."""
    fields = {name if name == "engines" else f"{name}Seconds": dice.choice(EXTREMES) for name in MEASURES}
    return msgspec.convert(fields | {"step": dice.choice((number, 0)), "steady": dice.random() < 0.8}, FinishedStep)


def test_whatever_a_manager_measured_is_a_decision(build: Any) -> None:
    """A manager's image may be its job's author's: numbers of his had the job's reconcile raise for ever."""
    dice, job = random.Random(13), build.job(scaling=GAP)
    stored = {"startTime": second(build.now - 999), "rollout": {"desiredReplicas": 3}}
    for _ in range(100):
        steps = tuple(drawn_step(dice, number) for number in range(7, 8 + dice.randrange(5)))
        values = {"reservedSeconds": dice.choice((1e308, -1e308, 5.0))}
        ctx = build.ctx(job, stored, manager=build.manager(step=7, finished_steps=steps, values=values))
        decision = scale_decision(ctx, [])
        ScalingStatus.model_validate(decision.scaling.model_dump(by_alias=True, mode="json"))
