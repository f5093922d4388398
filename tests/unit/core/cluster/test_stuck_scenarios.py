"""A job whose trainer cannot go on with what was edited: whatever happens meanwhile, it waits to be corrected."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.testing.fake_operator import FakeOperator
from polyrl.testing.job_values import raw_job
from polyrl.worker import Role
from tests.unit.core.cluster.scenario import Scenario, running

CANNOT_GO_ON = "Container trainer for pod n/{} failed with exit code 78 matching FailJob rule at index 3"
"""The Job controller's words."""


def spec_of(scenario: Scenario) -> Any:
    return scenario.cluster.objects["PolyRLJob", "j"]["spec"]


def edit_recipe(scenario: Scenario, **more: Any) -> None:
    scenario.cluster.edit(recipe=spec_of(scenario)["recipe"] | more)


def job_uid(scenario: Scenario) -> str:
    return str(scenario.cluster.objects["Job", "j-trainer"]["metadata"]["uid"])


def end(scenario: Scenario, code: int, reason: str, message: str) -> None:
    """The trainer's Job fails, and its pod goes with the node that nobody needed any more."""
    (pod,) = scenario.names(Role.TRAINER)
    scenario.cluster.end_pod(pod, code)
    scenario.cluster.end_trainer("Failed", reason, message.format(pod))
    scenario.cluster.drop("Pod", pod)


def stuck() -> Scenario:
    scenario = running(raw_job())
    scenario.cluster.edit(suspend=True)
    scenario.go(60)
    scenario.cluster.edit(suspend=False, recipe=spec_of(scenario)["recipe"] | {"algorithm": {"steps": 1}})
    scenario.go(20)
    end(scenario, 78, "PodFailurePolicy", CANNOT_GO_ON)
    scenario.go(60)
    assert (scenario.status.state, scenario.reason("Accepted")) == ("Pending", "CannotGoOn")
    return scenario


@pytest.mark.parametrize(
    ("slip", "reason"),
    [
        pytest.param({"minReplicas": 99}, "Invalid", id="not understood"),
        pytest.param(
            {"template": {"spec": {"containers": [{"name": "rollout", "command": ["sh"]}]}}},
            "Unsupported",
            id="not supported",
        ),
    ],
)
def test_a_wrong_edit_of_a_job_that_waits_ends_it_no_more_than_the_first(slip: dict[str, Any], reason: str) -> None:
    """The stored reason was the only memory of why its Job had failed: put back, the job was Failed for ever."""
    scenario = stuck()
    before = spec_of(scenario)["rollout"]
    scenario.cluster.edit(rollout=before | slip)
    scenario.go(20)
    assert scenario.reason("Accepted") == reason
    scenario.operator = FakeOperator(scenario.cluster)
    scenario.cluster.edit(rollout=before)
    scenario.go(20)
    assert (scenario.status.state, scenario.reason("Accepted")) == ("Pending", "CannotGoOn")
    assert scenario.message()["Refused"] == 1, "what is refused for another reason is said, once"
    edit_recipe(scenario, algorithm={"steps": 20})
    scenario.go(40)
    assert (scenario.status.state, scenario.reason("Accepted")) == ("Running", "Valid")


def test_an_operator_that_was_away_learns_from_the_job_why_it_failed() -> None:
    """Its node was given back meanwhile, and its pod with it."""
    scenario = running(raw_job())
    end(scenario, 78, "PodFailurePolicy", CANNOT_GO_ON)
    scenario.cluster.pass_time(3600)
    scenario.operator = FakeOperator(scenario.cluster)
    scenario.go(20)
    assert (scenario.status.state, scenario.reason("Accepted")) == ("Pending", "CannotGoOn")


def test_a_job_that_was_edited_while_it_ran_fails_as_any_other() -> None:
    """As long as the end of its pod might still be seen it was made anew with the edit, in the middle of a run."""
    scenario = running(raw_job())
    edit_recipe(scenario, seed=5)
    scenario.go(5)
    before = job_uid(scenario)
    end(scenario, 137, "BackoffLimitExceeded", "Job has reached the specified backoff limit")
    scenario.go(30)
    assert job_uid(scenario) == before
    assert scenario.reason("Failed") == "BackoffLimitExceeded"


BACK_OFF = ("BackoffLimitExceeded", "Job has reached the specified backoff limit")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "edited", "steps", "state"),
    [
        pytest.param(2, True, 0, "Pending", id="with the edit it never learned"),
        pytest.param(2, True, 1, "Failed", id="it learned with the edit"),
        pytest.param(2, False, 0, "Failed", id="nothing was edited"),
        pytest.param(0, True, 0, "Failed", id="it never learned"),
    ],
)
def test_an_edit_under_which_no_step_ends_waits_for_another(before: int, edited: bool, steps: int, state: str) -> None:
    """Too little memory, or rows that nobody finds, ended the job for ever."""
    scenario = running(raw_job())
    for _ in range(before):
        scenario.step()
    scenario.cluster.edit(suspend=True)
    scenario.go(60)
    scenario.cluster.edit(suspend=False, **({"recipe": spec_of(scenario)["recipe"] | {"seed": 5}} if edited else {}))
    scenario.go(20)
    for _ in range(steps):
        scenario.step()
    end(scenario, 137, *BACK_OFF)
    scenario.go(60)
    assert scenario.status.state == state
    accepted = scenario.condition("Accepted")
    if state == "Pending" and accepted is not None:
        assert (accepted.reason, scenario.message()["Refused"]) == ("CannotGoOn", 1)
        assert BACK_OFF[1] in accepted.message
        assert not scenario.names() + scenario.names(Role.MANAGER)
        edit_recipe(scenario, seed=6)
        scenario.go(40)
        assert (scenario.status.state, scenario.reason("Accepted")) == ("Running", "Valid")


def test_a_first_trainer_that_ends_no_step_fails() -> None:
    scenario = running(raw_job())
    end(scenario, 137, *BACK_OFF)
    scenario.go(30)
    assert scenario.reason("Failed") == "BackoffLimitExceeded"
