"""Whole stories of one job on the fake cluster: what a user would see, step by step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from polyrl.cluster import names
from polyrl.cluster.actions import (
    Action,
    Annotate,
    Create,
    Delete,
    DrainEngine,
    DryRun,
    ReconcileResult,
    RecordEvent,
    SuspendTrainer,
)
from polyrl.cluster.reconcile import reconcile
from polyrl.cluster.state import ReconcileState
from polyrl.manifest.status import Condition, JobStatus
from polyrl.sample import Pool
from polyrl.testing.fake_cluster import FakeCluster, is_ended
from polyrl.testing.fake_operator import SETTINGS, FakeOperator
from polyrl.testing.job_values import raw_job
from polyrl.worker import Role


class Story:
    """A job, its cluster, and an operator that sees all at once."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.cluster = FakeCluster(job)
        self.operator = FakeOperator(self.cluster)

    def turn(self) -> ReconcileResult:
        self.operator.catch_up()
        return self.operator.turn()

    def go(self, seconds: float, every: float = 1.0) -> list[Action]:
        """Lets time pass with a turn after each second; returns what was done."""
        done = len(self.operator.done)
        end = self.cluster.now + seconds
        self.turn()
        while self.cluster.now < end:
            self.cluster.pass_time(every)
            self.turn()
        return self.operator.done[done:]

    @property
    def status(self) -> JobStatus:
        return JobStatus.model_validate(self.cluster.objects["PolyRLJob", "j"]["status"])

    def condition(self, kind: str) -> Condition | None:
        return next((one for one in self.status.conditions if one.type == kind), None)

    def reason(self, kind: str) -> str:
        found = self.condition(kind)
        return "" if found is None else found.reason

    def names(self, role: Role = Role.ROLLOUT) -> list[str]:
        return sorted(pod["metadata"]["name"] for pod in self.cluster.pods(role))

    def pod(self, name: str) -> Any:
        return self.cluster.objects["Pod", name]

    def message(self) -> Counter[str]:
        return Counter(say.reason for say in self.operator.message)

    def delete(self, name: str, grace_s: int | None = None) -> None:
        self.cluster.delete("Pod", name, self.pod(name)["metadata"]["uid"], grace_s)

    def step(self, **values: float) -> None:
        times = {"rolloutSeconds": 20.0, "trainSeconds": 20.0, "stepSeconds": 21.0}
        self.operator.step += 1
        self.operator.values = times | values
        self.turn()


@pytest.fixture
def story() -> Story:
    """A running job of three rollouts."""
    return running(raw_job())


def running(job: dict[str, Any], seconds: float = 20) -> Story:
    story = Story(job)
    story.go(seconds)
    return story


def of(actions: list[Action], kind: type[Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def test_from_nothing_to_running() -> None:
    story = Story(raw_job())
    assert [type(action) for action in story.turn().actions] == [DryRun]
    assert story.status.state == "Pending"
    story.go(20)
    assert (story.names(), story.names(Role.MANAGER)) == (["j-r-1", "j-r-2", "j-r-3"], ["j-manager-1"])
    status = story.status
    assert (status.state, status.rollout.registered_replicas, status.rollout.desired_replicas) == ("Running", 3, 3)
    assert status.rollout.selector == "polyrl.dev/job-name=j,polyrl.dev/role=rollout"
    assert (status.observed_generation, status.run_id, status.trainer.ready) == (1, "job", 1)
    for kind in ("Accepted", "TrainerReady", "RolloutAvailable"):
        found = story.condition(kind)
        assert found is not None
        assert found.status == "True"
    assert story.message() == Counter(RolloutCreated=1, Accepted=1, TrainerReady=1)
    assert not story.turn().actions


@pytest.mark.parametrize("grace_s", [None, 0])
def test_deleted_rollout_is_replaced_at_once_and_counted_once(story: Story, grace_s: int | None) -> None:
    story.delete("j-r-2", grace_s)
    first = list(story.turn().actions)
    assert [action.object["metadata"]["name"] for action in of(first, Create)] == ["j-r-4"]
    assert isinstance(first[0], DrainEngine) == (grace_s is None)
    story.go(30)
    assert story.names() == ["j-r-1", "j-r-3", "j-r-4"]
    rollout = story.status.rollout
    assert (rollout.preemptions, rollout.failures, rollout.created) == (1, 0, 4)
    entry = story.status.recent_disruptions[-1]
    assert (entry.pod_name, entry.reason) == ("j-r-2", "PodDeleted")
    assert entry.delete_time is not None
    assert story.message()["RolloutPreempted"] == 1


def test_notice_is_drained_within_the_grace_that_is_left(story: Story) -> None:
    story.delete("j-r-2")
    story.cluster.pass_time(6)
    (drain,) = of(list(story.turn().actions), DrainEngine)
    assert (drain.pod, drain.deadline_s) == ("j-r-2", pytest.approx(4.0)), "10 s of grace, 6 of them gone"
    assert not of(story.go(3), DrainEngine), "told once"


def test_at_risk_is_not_replaced_and_goes_first(story: Story) -> None:
    node = story.pod("j-r-2")["spec"]["nodeName"]
    story.cluster.taint_node(node, "DeletionCandidateOfClusterAutoscaler")
    assert not story.go(5)
    story.cluster.edit(scaling={"mode": "Manual"}, rollout={"replicas": 2, "maxReplicas": 6, "drainSeconds": 5})
    story.go(30)
    assert story.names() == ["j-r-1", "j-r-3"]
    assert story.status.rollout.preemptions == 0


def test_scale_down_is_no_preemption_and_drains(story: Story) -> None:
    story.cluster.edit(scaling={"mode": "Manual"}, rollout={"replicas": 1, "maxReplicas": 6, "drainSeconds": 5})
    done = story.go(30)
    assert len(of(done, DrainEngine)) == 2
    assert story.names() == ["j-r-1"]
    assert (story.status.rollout.preemptions, story.status.rollout.failures) == (0, 0)
    assert story.message()["RolloutReleased"] == 1


@pytest.mark.parametrize("code", [1, 137])
def test_failure_waits_and_is_no_preemption(story: Story, code: int) -> None:
    story.cluster.end_pod("j-r-2", code)
    story.go(9)
    assert story.names() == ["j-r-1", "j-r-3"]
    assert (story.status.rollout.preemptions, story.status.rollout.failures) == (0, 1)
    story.go(20)
    assert story.names() == ["j-r-1", "j-r-3", "j-r-4"]


def test_rollouts_that_fail_at_start_are_tried_ever_more_rarely() -> None:
    story = running(raw_job({"replicas": 1, "maxReplicas": 1}))
    made = []
    for _ in range(300):
        for pod in story.cluster.pods(Role.ROLLOUT):
            if not is_ended(pod) and pod["spec"].get("nodeName"):
                story.cluster.end_pod(pod["metadata"]["name"], 2)
        made += of(story.go(2, every=2), Create)
    assert 5 <= len(made) <= 7, "after 10, 20, 40, 80, 160 and 300 s"
    assert story.reason("RolloutAvailable") == "FailedStarts"
    assert story.status.state == "Degraded"
    story.go(600, every=10)
    assert story.status.state == "Running"
    assert story.reason("RolloutAvailable") == "Registered"


@pytest.mark.slow
def test_storm_of_two_hundred_lost_nodes() -> None:
    story = running(raw_job({"replicas": 200, "maxReplicas": 200}))
    story.cluster.pass_time(100)
    story.turn()
    trainer = story.names(Role.TRAINER)
    lost = [story.pod(name)["spec"]["nodeName"] for name in story.names()]
    for node in lost[:100]:
        story.cluster.lose_node(node)
    for node in lost[100:]:
        story.cluster.silence_node(node)
    done = story.go(120, every=10.0)
    preempted = [say for say in of(done, RecordEvent) if say.reason == "RolloutPreempted"]
    assert 1 <= len(preempted) <= 3, "one for those that are gone, one for those that fell silent"
    assert "100 rollouts" in preempted[0].message
    assert story.status.rollout.preemptions == 200
    assert story.status.rollout.registered_replicas == 200
    assert len(story.status.recent_disruptions) == 10
    assert story.names(Role.TRAINER) == trainer
    assert len(of(done, Create)) == 200


def test_silent_node_is_forced_only_after_its_grace_and_a_minute(story: Story) -> None:
    node = story.pod("j-r-2")["spec"]["nodeName"]
    story.cluster.silence_node(node)
    began = story.cluster.now
    forced_deletions: list[float] = []
    while "j-r-2" in story.names():
        forced_deletions += [story.cluster.now for one in of(story.go(1), Delete) if one.grace_s == 0]
        assert story.cluster.now - began < 200
    assert 60 + 10 <= forced_deletions[0] - began <= 100
    assert "j-r-4" in story.names()
    assert story.status.recent_disruptions[-1].reason == "NodeLost"


def test_completion(story: Story) -> None:
    story.cluster.end_trainer("Complete")
    story.go(30)
    assert (story.names(), story.names(Role.MANAGER)) == ([], [])
    assert story.status.state == "Complete"
    assert story.status.completion_time is not None
    assert (story.condition("Complete") is not None, story.condition("Failed")) == (True, None)
    assert story.status.rollout.preemptions == 0
    assert story.message()["Completed"] == 1
    assert ("Job", "j-trainer") in story.cluster.objects, "its pods and logs stay"
    assert not story.go(100)


def test_failure_names_reason_code_and_pod(story: Story) -> None:
    (pod,) = story.names(Role.TRAINER)
    story.cluster.end_pod(pod, 2)
    message = "Container trainer for pod n/j-trainer-0-x failed with exit code 2 matching FailJob rule at index 0"
    story.cluster.end_trainer("Failed", "PodFailurePolicy", message)
    story.go(30)
    failure = story.status.failure
    assert failure is not None
    assert (failure.reason, failure.exit_code, failure.pod_name) == ("PodFailurePolicy", 2, pod)
    assert story.status.state == "Failed"
    assert story.names() == []
    assert story.reason("Failed") == "PodFailurePolicy"


def test_ttl_deletes_the_job_itself() -> None:
    story = running(raw_job(ttlSecondsAfterFinished=60))
    story.cluster.end_trainer("Complete")
    decision = story.turn()
    assert decision.wake_at == pytest.approx(story.cluster.now + 60, abs=2)
    story.cluster.pass_time(62)
    story.turn()
    deletion = of(story.operator.done, Delete)[-1]
    assert (deletion.kind, deletion.name, deletion.uid) == ("PolyRLJob", "j", "job")


def test_suspend_stops_the_trainer_first_and_resume_goes_on(story: Story) -> None:
    story.cluster.edit(suspend=True)
    first = list(story.turn().actions)
    assert isinstance(first[0], SuspendTrainer)
    assert story.names(Role.MANAGER) == ["j-manager-1"], "the trainer still says goodbye to it"
    story.go(60)
    assert story.cluster.pods() == []
    assert (story.status.state, story.reason("Suspended")) == ("Suspended", "Suspended")
    assert ("PersistentVolumeClaim", "j-manager") in story.cluster.objects
    assert not story.go(60)
    story.cluster.edit(suspend=False)
    story.go(30)
    assert story.names() == ["j-r-4", "j-r-5", "j-r-6"]
    assert story.names(Role.MANAGER) == ["j-manager-2"]
    assert story.status.rollout.preemptions == 0
    assert story.status.trainer.disruptions == 0
    assert story.message()["Suspended"] == story.message()["Resumed"] == 1
    assert story.status.state == "Running"


def test_deadline_counts_running_time_only() -> None:
    story = running(raw_job(activeDeadlineSeconds=100), seconds=50)
    story.cluster.edit(suspend=True)
    story.go(500, every=10)
    story.cluster.edit(suspend=False)
    story.go(40)
    assert story.status.state == "Running"
    story.go(30)
    assert story.status.state == "Failed"
    assert story.reason("Failed") == "DeadlineExceeded"
    story.go(60)
    assert story.cluster.pods() == []
    assert ("Job", "j-trainer") in story.cluster.objects


def test_manager_is_replaced_when_it_ended_or_is_gone(story: Story) -> None:
    story.cluster.end_pod("j-manager-1", 1, "Evicted")
    story.go(15)
    assert story.names(Role.MANAGER) == ["j-manager-2"]
    story.delete("j-manager-2", 0)
    story.go(5)
    assert story.names(Role.MANAGER) == ["j-manager-3"]
    assert story.status.manager.created == 3
    assert story.names() == ["j-r-1", "j-r-2", "j-r-3"], "rollouts wait for it"


def test_new_manager_waits_until_the_old_one_cannot_write(story: Story) -> None:
    story.cluster.silence_node(story.pod("j-manager-1")["spec"]["nodeName"])
    story.go(30)
    assert story.names(Role.MANAGER) == ["j-manager-1"]
    assert story.reason("TrainerReady") == "ManagerUnreachable"
    assert story.status.state == "Degraded"
    story.go(60)
    assert story.names(Role.MANAGER) == ["j-manager-2"]


def test_managed_by_another_is_left_alone() -> None:
    story = Story(raw_job(managedBy="kueue.x-k8s.io/multikueue"))
    story.operator.catch_up()
    decision = reconcile(story.operator.facts(), SETTINGS, ReconcileState(), story.cluster.now)
    assert (decision.actions, decision.status, decision.wake_at) == ((), JobStatus(), None)


def test_what_is_no_job_is_refused_and_nothing_is_made() -> None:
    job = raw_job()
    job["spec"]["rollout"]["minReplicas"] = 9
    story = Story(job)
    story.go(5)
    assert story.reason("Accepted") == "Invalid"
    assert "maxReplicas" in story.status.conditions[0].message
    assert {kind for kind, _ in story.cluster.objects} == {"PolyRLJob"}
    assert story.message() == Counter(Refused=1)


def test_unsupported_is_refused_with_its_sentence() -> None:
    story = Story(raw_job(trainer={"replicas": 2}))
    story.go(5)
    assert story.reason("Accepted") == "Unsupported"
    assert "spec.trainer.replicas" in story.status.conditions[0].message
    assert {kind for kind, _ in story.cluster.objects} == {"PolyRLJob"}


def test_dry_run_that_refuses_is_asked_again_and_its_words_are_shown() -> None:
    story = Story(raw_job())
    story.turn()
    story.operator.dry_run = (1, 'Pod j-r-0: violates PodSecurity "restricted"')
    done = story.go(55)
    assert not of(done, DryRun)
    assert story.reason("Accepted") == "InvalidPodTemplate"
    assert "PodSecurity" in story.status.conditions[0].message
    assert story.cluster.pods() == []
    assert of(story.go(10), DryRun)
    story.go(20)
    assert story.status.state == "Running"


def test_used_up_quota_is_no_fault_of_the_template() -> None:
    story = Story(raw_job())
    story.turn()
    story.operator.dry_run = (1, "Pod j-r-0: pods is forbidden: exceeded quota: pods")
    story.cluster.quota = 3
    done = story.go(59)
    assert story.reason("Accepted") == "Valid"
    assert story.reason("CapacityLimited") == "QuotaExceeded"
    assert len(story.cluster.pods()) == 3
    assert len(of(done, Create)) < 20, "not asked for again each second"
    story.cluster.quota = None
    story.go(700, every=10)
    assert len(story.names()) == 3
    assert story.reason("CapacityLimited") == "Enough"


def test_trainer_template_changed_while_it_runs(story: Story) -> None:
    before = dict(story.cluster.objects["Job", "j-trainer"])
    container = {"containers": [{"name": "trainer", "image": "other"}]}
    story.cluster.edit(trainer={"template": {"spec": container}})
    story.go(20)
    assert story.reason("Accepted") == "ImmutableFieldChanged"
    assert story.cluster.objects["Job", "j-trainer"] == before
    story.delete("j-r-1", 0)
    story.go(10)
    assert len(story.names()) == 3, "the fleet is still looked after"
    story.cluster.edit(suspend=True)
    story.go(60)
    story.cluster.edit(suspend=False)
    assert isinstance(next(action for action in story.go(20) if not isinstance(action, RecordEvent)), DryRun | Delete)
    assert story.reason("Accepted") == "Valid"
    new = story.cluster.objects["Job", "j-trainer"]["spec"]["template"]["spec"]["containers"]
    assert new[0]["image"] == "other"


@pytest.mark.parametrize("kind", ["Rolling", "OnDelete"])
def test_rollout_template_rolls_between_steps(story: Story, kind: str) -> None:
    story.step()
    fleet = story.cluster.objects["PolyRLJob", "j"]["spec"]["rollout"]
    container = {"containers": [{"name": "rollout", "image": "other"}]}
    story.cluster.edit(rollout=fleet | {"template": {"spec": container}, "update": {"type": kind}})
    story.go(60)
    assert story.names() == ["j-r-1", "j-r-2", "j-r-3"], "not within a step"
    for number in range(1, 4):
        story.step()
        story.go(30)
        assert story.status.rollout.updated_replicas == (number if kind == "Rolling" else 0)
        assert len(story.names()) == 3
    assert (story.status.rollout.preemptions, story.status.rollout.failures) == (0, 0)


def test_fleet_follows_the_gap(story: Story) -> None:
    story.step()
    story.step(rolloutSeconds=30.0)
    assert story.status.rollout.desired_replicas == 5
    story.go(15)
    assert story.status.rollout.registered_replicas == 5
    assert "3 -> 5" in story.status.scaling.last_reason
    assert story.reason("ScalingActive") == "Measured"
    story.step(rolloutSeconds=100.0)
    assert story.status.rollout.desired_replicas == 5, "the number of engines changed during that step"
    for _ in range(4):
        story.go(40)
        story.step(rolloutSeconds=5.0)
    assert story.status.rollout.desired_replicas == 4
    story.go(15)
    assert len(story.names()) == 4
    assert story.message()["RolloutScaledUp"] == story.message()["RolloutScaledDown"] == 1
    story.go(1000, every=20)
    assert story.reason("ScalingActive") == "MetricsStale"


def test_written_replicas_move_nothing_in_mode_gap_and_say_so(story: Story) -> None:
    story.cluster.edit(rollout=story.cluster.objects["PolyRLJob", "j"]["spec"]["rollout"] | {"replicas": 5})
    story.go(10)
    assert len(story.names()) == 3
    assert story.message()["ReplicasIgnored"] == 1


def test_spot_goes_and_comes_back() -> None:
    capacity = {"policy": "SpotPreferred", "fallback": {"enabled": True, "afterSeconds": 60}}
    story = running(raw_job({"capacity": capacity, "pendingTimeoutSeconds": 120, "maxReplicas": 3}))
    story.cluster.room[Pool.SPOT.value] = 0
    for name in story.names():
        story.delete(name, 0)
    story.go(100)
    status = story.status.rollout
    assert (status.on_demand_replicas, status.registered_replicas) == (3, 3)
    story.go(100)
    assert story.status.rollout.pending_replicas == 1, "one probe"
    assert story.reason("CapacityLimited") == "SpotUnavailable"
    assert story.message()["FallbackOnDemand"] >= 1
    story.cluster.room[Pool.SPOT.value] = 100
    story.go(120)
    status = story.status.rollout
    assert (status.spot_replicas, status.on_demand_replicas, status.registered_replicas) == (3, 0, 3)
    assert story.reason("CapacityLimited") == "Enough"


def test_no_capacity_for_two_hours_then_it_returns() -> None:
    story = running(raw_job({"replicas": 5, "maxReplicas": 5}), seconds=5)
    story.cluster.room[Pool.SPOT.value] = 0
    for name in story.names():
        story.delete(name, 0)
    story.go(1210, every=10)
    for _ in range(60):
        story.go(100, every=20)
        assert len(story.names()) == 1
    assert story.status.state == "Running", "zero rollouts is a normal state"
    assert story.status.rollout.pools[0].state == "BackingOff"
    story.cluster.room[Pool.SPOT.value] = 100
    story.go(60)
    assert story.status.rollout.registered_replicas == 5


def test_who_was_pushed_out_does_not_push_back(story: Story) -> None:
    """Where a pod of higher priority took the room, asking at once would only lose again."""
    for name in story.names():
        story.cluster.end_pod(name, 143, disruption="PreemptionByScheduler")
    story.cluster.room[Pool.SPOT.value] = 0
    done = story.go(50)
    assert len(of(done, Create)) == 1, "one probe"
    assert story.reason("CapacityLimited") == "SpotUnavailable"
    assert story.status.rollout.preemptions == 3
    story.cluster.room[Pool.SPOT.value] = 100
    story.go(20)
    assert len(story.names()) == 3


def test_notice_that_was_seen_late_still_gets_its_time(story: Story) -> None:
    node = story.pod("j-r-2")["spec"]["nodeName"]
    story.cluster.taint_node(node, "ToBeDeletedByClusterAutoscaler")
    story.cluster.pass_time(300)
    (drain,) = of(story.go(0), DrainEngine)
    assert drain.deadline_s == 5
    assert not [one for one in of(story.go(12), Delete) if one.name == "j-r-2"]
    assert [one.name for one in of(story.go(8), Delete)] == ["j-r-2"], "gone by then, or we end it"


def test_pod_that_never_registers_is_replaced_as_a_failure() -> None:
    story = running(raw_job({"replicas": 1, "maxReplicas": 1, "startupTimeoutSeconds": 100}), seconds=2)
    story.cluster.unheard.add("j-r-1")
    story.go(99)
    assert story.names() == ["j-r-1"]
    story.go(20)
    assert story.status.rollout.failures == 1
    assert story.message()["RolloutFailed"] == 1


def test_disrupted_trainer_is_counted_once(story: Story) -> None:
    (pod,) = story.names(Role.TRAINER)
    story.cluster.end_pod(pod, 143, disruption="EvictionByEvictionAPI")
    story.go(20)
    assert story.status.trainer.disruptions == 1
    assert story.status.state == "Running"
    assert not of(story.go(10), Annotate)


def test_cost_is_pod_seconds_at_the_prices() -> None:
    prices = {"spotPerHour": 3.6, "onDemandPerHour": 36.0, "reservedPerHour": 7.2}
    story = running(raw_job(pricing=prices), seconds=20)
    story.go(1980, every=20)
    story.cluster.end_trainer("Complete")
    story.turn()
    cost = story.status.cost
    assert cost.spot_micros == pytest.approx(2000 * 3 * 1000, rel=0.01)
    assert cost.reserved_micros == pytest.approx(2000 * 2000, rel=0.01)
    assert cost.on_demand_micros == 0
    story.go(200)
    assert story.status.cost == cost


def test_children_are_mended_and_leave_when_no_longer_asked_for(story: Story) -> None:
    story.cluster.drop("Service", "j-manager")
    story.cluster.patch("PodDisruptionBudget", "j-trainer", {"metadata": {"name": "j-trainer", "uid": "x"}})
    story.go(2)
    assert ("Service", "j-manager") in story.cluster.objects
    mended = story.cluster.objects["PodDisruptionBudget", "j-trainer"]
    assert mended["metadata"]["annotations"][names.ANNOTATION_CONTENT]
    story.cluster.edit(podDisruptionBudget={"trainer": "None"})
    story.go(2)
    assert ("PodDisruptionBudget", "j-trainer") not in story.cluster.objects


def test_job_that_samples_nothing_has_a_trainer_only() -> None:
    job = raw_job()
    job["spec"]["recipe"] = {
        "mode": "sft",
        "model": {"path": "/model"},
        "data": {"sft": [{"path": "a.jsonl"}]},
        "sft": {"steps": 5},
    }
    story = running(job)
    assert {pod["metadata"]["labels"][names.LABEL_ROLE] for pod in story.cluster.pods()} == {"trainer"}
    assert ("Secret", "j-keys") not in story.cluster.objects
    assert story.status.state == "Running"


def test_new_operator_takes_over_in_silence(story: Story) -> None:
    story.delete("j-r-1", 0)
    story.go(30)
    before = story.status
    story.operator = FakeOperator(story.cluster, dry_run=None)
    assert story.turn().actions == ()
    assert story.status == before
