"""How many rollouts are desired, by whoever decides."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.cluster.autoscaling import StepMeasurement, StepObservation, scale_decision, stale_at
from polyrl.cluster.state import Recommendation, ReconcileState
from polyrl.cluster.timestamps import millisecond, second

SLOW_ROLLOUTS = StepMeasurement(step=7, engines=3, rollout_s=40.0, train_s=20.0, step_s=41.0)
NOTHING = StepObservation(None)
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
    decision = scale_decision(build.ctx(build.job(**spec), stored), [], NOTHING)
    assert (decision.desired_replicas, decision.reason, decision.active) == expected


@pytest.mark.parametrize(("scaled_ago", "desired"), [(None, 4), (59.0, 3), (60.0, 4)], ids=["never", "cooling", "cool"])
def test_a_measured_step_moves_the_number_once_cooled(build: Any, scaled_ago: float | None, desired: int) -> None:
    scaling = {} if scaled_ago is None else {"lastScaleTime": millisecond(build.now - scaled_ago)}
    rule = GAP | {"gap": GAP["gap"] | {"maxScaleUpPerStep": 1}}  # type: ignore[operator]
    status = {"startTime": second(build.now - 999), "rollout": {"desiredReplicas": 3}, "scaling": scaling}
    decision = scale_decision(build.ctx(build.job(scaling=rule), status), [], StepObservation(None, SLOW_ROLLOUTS))
    assert (decision.desired_replicas, bool(decision.changed)) == (desired, desired != 3)
    assert (decision.scaling.last_step, decision.scaling.recommended_replicas) == (7, 6)
    assert (decision.scaling.last_scale_time == millisecond(build.now)) == (desired != 3)


def test_windows_are_kept_while_measurements_count(build: Any) -> None:
    state = ReconcileState(recommendations=(Recommendation(6, 5),))
    job = build.job(scaling=GAP)
    stored = {"scaling": {"lastStepTime": millisecond(build.now - 1)}}
    assert scale_decision(build.ctx(job, stored, state), [], NOTHING).window == state.recommendations
    assert scale_decision(build.ctx(job, {}, state), [], NOTHING).window == state.recommendations
    stale = build.ctx(job, {"scaling": {"lastStepTime": millisecond(build.now - 601)}}, state)
    assert scale_decision(stale, [], NOTHING).window == state.recommendations, "the next step goes on from it"
    assert stale_at(stale) == build.now - 1
