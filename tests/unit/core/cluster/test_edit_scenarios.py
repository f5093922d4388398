"""What becomes of what a job is written as, and edited to while it lives: taken up, awaited or refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from polyrl.cluster.actions import (
    Create,
    Delete,
    DryRun,
    LimitRestarts,
    SuspendTrainer,
)
from polyrl.cluster.reconcile import reconcile
from polyrl.cluster.state import ReconcileState
from polyrl.manifest.status import JobStatus
from polyrl.testing.fake_operator import SETTINGS, FakeOperator
from polyrl.testing.job_values import raw_job
from polyrl.worker import Role
from tests.unit.core.cluster.scenario import Scenario, of


def test_managed_by_another_is_left_alone() -> None:
    scenario = Scenario(raw_job(managedBy="kueue.x-k8s.io/multikueue"))
    scenario.operator.catch_up()
    decision = reconcile(scenario.operator.facts(), SETTINGS, ReconcileState(), scenario.cluster.now)
    assert (decision.actions, decision.status, decision.wake_at) == ((), JobStatus(), None)


def test_what_is_no_job_is_refused_and_nothing_is_made() -> None:
    job = raw_job()
    job["spec"]["rollout"]["minReplicas"] = 9
    scenario = Scenario(job)
    scenario.go(5)
    assert scenario.reason("Accepted") == "Invalid"
    assert "maxReplicas" in scenario.status.conditions[0].message
    assert {kind for kind, _ in scenario.cluster.objects} == {"PolyRLJob"}
    assert scenario.message() == Counter(Refused=1)


def test_unsupported_is_refused_with_its_sentence() -> None:
    own_command = {"spec": {"containers": [{"name": "trainer", "command": ["sh"]}]}}
    scenario = Scenario(raw_job(trainer={"template": own_command}))
    scenario.go(5)
    assert scenario.reason("Accepted") == "Unsupported"
    assert "spec.trainer.template" in scenario.status.conditions[0].message
    assert {kind for kind, _ in scenario.cluster.objects} == {"PolyRLJob"}


def test_dry_run_that_refuses_is_asked_again_and_its_words_are_shown() -> None:
    scenario = Scenario(raw_job())
    scenario.turn()
    scenario.operator.dry_run = (1, 'Pod j-r-0: violates PodSecurity "restricted"')
    done = scenario.go(55)
    assert not of(done, DryRun)
    assert scenario.reason("Accepted") == "InvalidPodTemplate"
    assert "PodSecurity" in scenario.status.conditions[0].message
    assert scenario.cluster.pods() == []
    assert of(scenario.go(10), DryRun)
    scenario.go(20)
    assert scenario.status.state == "Running"


def test_used_up_quota_is_no_fault_of_the_template() -> None:
    scenario = Scenario(raw_job())
    scenario.turn()
    scenario.operator.dry_run = (1, "Pod j-r-0: pods is forbidden: exceeded quota: pods")
    scenario.cluster.quota = 3
    done = scenario.go(59)
    assert scenario.reason("Accepted") == "Valid"
    assert scenario.reason("CapacityLimited") == "QuotaExceeded"
    assert len(scenario.cluster.pods()) == 3
    assert len(of(done, Create)) < 20, "not asked for again each second"
    scenario.cluster.quota = None
    scenario.go(700, every=10)
    assert len(scenario.names()) == 3
    assert scenario.reason("CapacityLimited") == "Enough"


def test_trainer_template_changed_while_it_runs(scenario: Scenario) -> None:
    before = dict(scenario.cluster.objects["Job", "j-trainer"])
    container = {"containers": [{"name": "trainer", "image": "other"}]}
    scenario.cluster.edit(trainer={"template": {"spec": container}})
    scenario.go(20)
    assert scenario.reason("Accepted") == "ImmutableFieldChanged"
    assert scenario.cluster.objects["Job", "j-trainer"] == before
    scenario.delete("j-r-1", 0)
    scenario.go(10)
    assert len(scenario.names()) == 3, "the fleet is still looked after"
    scenario.cluster.edit(suspend=True)
    scenario.go(60)
    scenario.cluster.edit(suspend=False)
    done = scenario.go(20)
    assert [one.kind for one in of(done, Delete)] == ["Job"]
    assert not of(done, SuspendTrainer), "what it was written as before goes on no more"
    assert scenario.reason("Accepted") == "Valid"
    new = scenario.cluster.objects["Job", "j-trainer"]["spec"]["template"]["spec"]["containers"]
    assert new[0]["image"] == "other"


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [("", ("True", "Valid")), ("Pod j-r-0: image is not signed", ("False", "InvalidPodTemplate"))],
    ids=["its pods fit", "its pods are refused"],
)
def test_an_edit_of_a_suspended_job_is_checked_before_it_goes_on(
    scenario: Scenario, answer: str, accepted: tuple[str, str]
) -> None:
    """It was said to be asked about, and nobody asked until it was resumed."""
    scenario.cluster.edit(suspend=True)
    scenario.go(60)
    fleet = scenario.cluster.objects["PolyRLJob", "j"]["spec"]["rollout"]
    container = {"containers": [{"name": "rollout", "image": "other"}]}
    scenario.cluster.edit(rollout=fleet | {"template": {"spec": container}})
    assert [action.generation for action in of(list(scenario.turn().actions), DryRun)] == [3]
    scenario.operator.dry_run = (3, answer)
    done = scenario.go(50)
    found = scenario.condition("Accepted")
    assert found is not None
    assert (found.status, found.reason) == accepted
    assert scenario.status.state == "Suspended"
    assert not of(done, DryRun) + of(done, Create)


def edit_recipe(scenario: Scenario, **more: Any) -> None:
    """Suspends the job, edits it and lets it go on."""
    scenario.cluster.edit(suspend=True)
    scenario.go(60)
    recipe = scenario.cluster.objects["PolyRLJob", "j"]["spec"]["recipe"]
    scenario.cluster.edit(suspend=False, recipe=recipe | more)
    scenario.go(20)


@pytest.mark.parametrize("cure", ["edit", "suspend"])
def test_an_edit_that_the_trainer_cannot_go_on_with_ends_no_job(scenario: Scenario, cure: str) -> None:
    """Fewer steps than were done, or a slip in a path, made the job Failed for ever, with all that it had learned."""
    edit_recipe(scenario, algorithm={"steps": 1})
    first = scenario.cluster.objects["Job", "j-trainer"]["metadata"]["uid"]
    (pod,) = scenario.names(Role.TRAINER)
    scenario.cluster.end_pod(pod, 78)
    scenario.cluster.end_trainer("Failed", "PodFailurePolicy", "exit code 78")
    scenario.go(60)
    assert (scenario.status.state, scenario.reason("Accepted")) == ("Pending", "CannotGoOn")
    assert scenario.condition("Failed") is None
    assert scenario.message()["Refused"] == 1
    assert not scenario.names() + scenario.names(Role.MANAGER), "no machine waits for the user"
    assert not scenario.go(600, every=20), "and nothing is tried again and again"
    scenario.operator = FakeOperator(scenario.cluster)
    scenario.cluster.drop("Pod", pod)
    scenario.go(20)
    assert scenario.reason("Accepted") == "CannotGoOn", "also for an operator that begins when the pod is gone"
    if cure == "edit":
        recipe = scenario.cluster.objects["PolyRLJob", "j"]["spec"]["recipe"]
        scenario.cluster.edit(recipe=recipe | {"algorithm": {"steps": 20}})
    else:
        scenario.cluster.edit(suspend=True)
        scenario.go(60)
        assert scenario.reason("Suspended") == "Suspended"
        scenario.cluster.edit(suspend=False)
    scenario.go(40)
    assert (scenario.status.state, scenario.reason("Accepted")) == ("Running", "Valid")
    assert scenario.cluster.objects["Job", "j-trainer"]["metadata"]["uid"] != first
    assert scenario.status.rollout.preemptions == 0


def test_more_restarts_are_allowed_to_the_trainer_that_runs(scenario: Scenario) -> None:
    """The edit did nothing, and the job failed at the old limit."""
    scenario.cluster.edit(backoffLimit=20)
    scenario.go(5)
    assert scenario.cluster.objects["Job", "j-trainer"]["spec"]["backoffLimit"] == 20
    assert scenario.reason("Accepted") == "Valid"
    assert not of(scenario.go(20), LimitRestarts)


def test_a_template_that_the_api_server_refuses_costs_a_running_job_nothing(scenario: Scenario) -> None:
    """Rollouts that served made way for it, and a manager that was lost was not replaced."""
    scenario.step()
    fleet = scenario.cluster.objects["PolyRLJob", "j"]["spec"]["rollout"]
    container = {"containers": [{"name": "rollout", "image": "other"}]}
    scenario.cluster.edit(rollout=fleet | {"template": {"spec": container}, "update": {"maxUnavailable": 3}})
    scenario.operator.dry_run = (2, "Pod j-r-0: image is not signed")
    scenario.turn()
    assert scenario.reason("Accepted") == "InvalidPodTemplate"
    scenario.step()
    scenario.go(10)
    assert scenario.names() == ["j-r-1", "j-r-2", "j-r-3"]
    scenario.delete("j-manager-1", 0)
    scenario.go(10)
    assert scenario.names(Role.MANAGER) == ["j-manager-2"]


@pytest.mark.parametrize("kind", ["Rolling", "OnDelete"])
def test_rollout_template_rolls_between_steps(scenario: Scenario, kind: str) -> None:
    scenario.step()
    fleet = scenario.cluster.objects["PolyRLJob", "j"]["spec"]["rollout"]
    container = {"containers": [{"name": "rollout", "image": "other"}]}
    scenario.cluster.edit(rollout=fleet | {"template": {"spec": container}, "update": {"type": kind}})
    scenario.go(60)
    assert scenario.names() == ["j-r-1", "j-r-2", "j-r-3"], "not within a step"
    for number in range(1, 4):
        scenario.step()
        scenario.go(30)
        assert scenario.status.rollout.updated_replicas == (number if kind == "Rolling" else 0)
        assert len(scenario.names()) == 3
    assert (scenario.status.rollout.preemptions, scenario.status.rollout.failures) == (0, 0)
