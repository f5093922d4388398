"""Whole lives of one job on the fake cluster: what a user would see, step by step."""

from __future__ import annotations

from collections import Counter

import pytest

from polyrl.cluster import names
from polyrl.cluster.actions import (
    Annotate,
    Create,
    Delete,
    DrainEngine,
    DryRun,
    RecordEvent,
    SuspendTrainer,
)
from polyrl.sample import Pool
from polyrl.testing.fake_cluster import is_ended
from polyrl.testing.fake_operator import FakeOperator
from polyrl.testing.job_values import raw_job
from polyrl.worker import Role
from tests.unit.core.cluster.scenario import Scenario, of, running


def test_from_nothing_to_running() -> None:
    scenario = Scenario(raw_job())
    assert [type(action) for action in scenario.turn().actions] == [DryRun]
    assert scenario.status.state == "Pending"
    scenario.go(20)
    assert (scenario.names(), scenario.names(Role.MANAGER)) == (["j-r-1", "j-r-2", "j-r-3"], ["j-manager-1"])
    status = scenario.status
    assert (status.state, status.rollout.registered_replicas, status.rollout.desired_replicas) == ("Running", 3, 3)
    assert status.rollout.selector == "polyrl.dev/job-name=j,polyrl.dev/role=rollout"
    assert (status.observed_generation, status.run_id, status.trainer.ready) == (1, "job", 1)
    for kind in ("Accepted", "TrainerReady", "RolloutAvailable"):
        found = scenario.condition(kind)
        assert found is not None
        assert found.status == "True"
    assert scenario.message() == Counter(RolloutCreated=1, Accepted=1, TrainerReady=1)
    assert not scenario.turn().actions


@pytest.mark.parametrize("grace_s", [None, 0])
def test_deleted_rollout_is_replaced_at_once_and_counted_once(scenario: Scenario, grace_s: int | None) -> None:
    scenario.delete("j-r-2", grace_s)
    first = list(scenario.turn().actions)
    assert [action.object["metadata"]["name"] for action in of(first, Create)] == ["j-r-4"]
    assert isinstance(first[0], DrainEngine) == (grace_s is None)
    scenario.go(30)
    assert scenario.names() == ["j-r-1", "j-r-3", "j-r-4"]
    rollout = scenario.status.rollout
    assert (rollout.preemptions, rollout.failures, rollout.created) == (1, 0, 4)
    entry = scenario.status.recent_disruptions[-1]
    assert (entry.pod_name, entry.reason) == ("j-r-2", "PodDeleted")
    assert entry.delete_time is not None
    assert scenario.message()["RolloutPreempted"] == 1


def test_notice_is_drained_within_the_grace_that_is_left(scenario: Scenario) -> None:
    scenario.delete("j-r-2")
    scenario.cluster.pass_time(6)
    (drain,) = of(list(scenario.turn().actions), DrainEngine)
    assert (drain.pod, drain.deadline_s) == ("j-r-2", pytest.approx(4.0)), "10 s of grace, 6 of them gone"
    assert not of(scenario.go(3), DrainEngine), "sent once"


def test_at_risk_is_not_replaced_and_goes_first(scenario: Scenario) -> None:
    node = scenario.pod("j-r-2")["spec"]["nodeName"]
    scenario.cluster.taint_node(node, "DeletionCandidateOfClusterAutoscaler")
    assert not scenario.go(5)
    scenario.cluster.edit(scaling={"mode": "Manual"}, rollout={"replicas": 2, "maxReplicas": 6, "drainSeconds": 5})
    scenario.go(30)
    assert scenario.names() == ["j-r-1", "j-r-3"]
    assert scenario.status.rollout.preemptions == 0


def test_scale_down_is_no_preemption_and_drains(scenario: Scenario) -> None:
    scenario.cluster.edit(scaling={"mode": "Manual"}, rollout={"replicas": 1, "maxReplicas": 6, "drainSeconds": 5})
    done = scenario.go(30)
    drains = of(done, DrainEngine)
    assert [sorted(one.pod for one in drains if one.ended is ended) for ended in (False, True)] == [
        ["j-r-2", "j-r-3"]
    ] * 2
    assert scenario.names() == ["j-r-1"]
    assert (scenario.status.rollout.preemptions, scenario.status.rollout.failures) == (0, 0)
    assert scenario.message()["RolloutReleased"] == 1


@pytest.mark.parametrize("code", [1, 137])
def test_failure_waits_and_is_no_preemption(scenario: Scenario, code: int) -> None:
    scenario.cluster.end_pod("j-r-2", code)
    scenario.go(9)
    assert scenario.names() == ["j-r-1", "j-r-3"]
    assert (scenario.status.rollout.preemptions, scenario.status.rollout.failures) == (0, 1)
    scenario.go(20)
    assert scenario.names() == ["j-r-1", "j-r-3", "j-r-4"]


def test_rollouts_that_fail_at_start_are_tried_ever_more_rarely() -> None:
    scenario = running(raw_job({"replicas": 1, "maxReplicas": 1}))
    made = []
    for _ in range(300):
        for pod in scenario.cluster.pods(Role.ROLLOUT):
            if not is_ended(pod) and pod["spec"].get("nodeName"):
                scenario.cluster.end_pod(pod["metadata"]["name"], 2)
        made += of(scenario.go(2, every=2), Create)
    assert 5 <= len(made) <= 7, "after 10, 20, 40, 80, 160 and 300 s"
    assert scenario.reason("RolloutAvailable") == "FailedStarts"
    assert scenario.status.state == "Degraded"
    scenario.go(600, every=10)
    assert scenario.status.state == "Running"
    assert scenario.reason("RolloutAvailable") == "Registered"


@pytest.mark.slow
def test_storm_of_two_hundred_lost_nodes() -> None:
    scenario = running(raw_job({"replicas": 200, "maxReplicas": 200}))
    scenario.cluster.pass_time(100)
    scenario.turn()
    trainer = scenario.names(Role.TRAINER)
    lost = [scenario.pod(name)["spec"]["nodeName"] for name in scenario.names()]
    for node in lost[:100]:
        scenario.cluster.lose_node(node)
    for node in lost[100:]:
        scenario.cluster.silence_node(node)
    done = scenario.go(120, every=10.0)
    preempted = [event for event in of(done, RecordEvent) if event.reason == "RolloutPreempted"]
    assert 1 <= len(preempted) <= 3, "one for those that are gone, one for those that fell silent"
    assert "100 rollouts" in preempted[0].message
    assert scenario.status.rollout.preemptions == 200
    assert scenario.status.rollout.registered_replicas == 200
    assert len(scenario.status.recent_disruptions) == 10
    assert scenario.names(Role.TRAINER) == trainer
    assert len(of(done, Create)) == 200


def test_silent_node_is_forced_only_after_its_grace_and_a_minute(scenario: Scenario) -> None:
    node = scenario.pod("j-r-2")["spec"]["nodeName"]
    scenario.cluster.silence_node(node)
    began = scenario.cluster.now
    forced_deletions: list[float] = []
    while "j-r-2" in scenario.names():
        forced_deletions += [scenario.cluster.now for one in of(scenario.go(1), Delete) if one.grace_s == 0]
        assert scenario.cluster.now - began < 200
    assert 60 + 10 <= forced_deletions[0] - began <= 100
    assert "j-r-4" in scenario.names()
    assert scenario.status.recent_disruptions[-1].reason == "NodeLost"


def test_completion(scenario: Scenario) -> None:
    scenario.cluster.end_trainer("Complete")
    scenario.go(30)
    assert (scenario.names(), scenario.names(Role.MANAGER)) == ([], [])
    assert scenario.status.state == "Complete"
    assert scenario.status.completion_time is not None
    assert (scenario.condition("Complete") is not None, scenario.condition("Failed")) == (True, None)
    assert scenario.status.rollout.preemptions == 0
    assert scenario.message()["Completed"] == 1
    assert ("Job", "j-trainer") in scenario.cluster.objects, "its pods and logs stay"
    assert not scenario.go(100)


def test_failure_names_reason_code_and_pod(scenario: Scenario) -> None:
    (pod,) = scenario.names(Role.TRAINER)
    scenario.cluster.end_pod(pod, 2)
    message = "Container trainer for pod n/j-trainer-0-x failed with exit code 2 matching FailJob rule at index 0"
    scenario.cluster.end_trainer("Failed", "PodFailurePolicy", message)
    scenario.go(30)
    failure = scenario.status.failure
    assert failure is not None
    assert (failure.reason, failure.exit_code, failure.pod_name) == ("PodFailurePolicy", 2, pod)
    assert scenario.status.state == "Failed"
    assert scenario.names() == []
    assert scenario.reason("Failed") == "PodFailurePolicy"


def test_ttl_deletes_the_job_itself() -> None:
    scenario = running(raw_job(ttlSecondsAfterFinished=60))
    scenario.cluster.end_trainer("Complete")
    decision = scenario.turn()
    assert decision.wake_at == pytest.approx(scenario.cluster.now + 60, abs=2)
    scenario.cluster.pass_time(62)
    scenario.turn()
    deletion = of(scenario.operator.done, Delete)[-1]
    assert (deletion.kind, deletion.name, deletion.uid) == ("PolyRLJob", "j", "job")


def test_suspend_stops_the_trainer_first_and_resume_goes_on(scenario: Scenario) -> None:
    scenario.cluster.edit(suspend=True)
    first = list(scenario.turn().actions)
    assert isinstance(first[0], SuspendTrainer)
    assert scenario.names(Role.MANAGER) == ["j-manager-1"], "the trainer still says goodbye to it"
    ends: dict[str, float] = {}
    while scenario.cluster.pods():
        there = {pod["metadata"]["labels"][names.LABEL_ROLE] for pod in scenario.cluster.pods()}
        scenario.go(1)
        assert scenario.reason("Suspended") == ("Suspending" if scenario.cluster.pods() else "Suspended")
        left = {pod["metadata"]["labels"][names.LABEL_ROLE] for pod in scenario.cluster.pods()}
        ends |= {role: scenario.cluster.now for role in there - left}
    assert list(ends) == ["trainer", "rollout", "manager"]
    assert scenario.status.state == "Suspended"
    assert ("PersistentVolumeClaim", "j-manager") in scenario.cluster.objects
    assert not scenario.go(60)
    scenario.cluster.edit(suspend=False)
    scenario.go(30)
    assert scenario.names() == ["j-r-4", "j-r-5", "j-r-6"]
    assert scenario.names(Role.MANAGER) == ["j-manager-2"]
    assert scenario.status.rollout.preemptions == 0
    assert scenario.status.trainer.disruptions == 0
    assert scenario.message()["Suspended"] == scenario.message()["Resumed"] == 1
    assert scenario.status.state == "Running"


@pytest.mark.parametrize("changed", [False, True], ids=["same template", "another template"])
def test_a_resume_makes_no_second_trainer_while_the_first_still_ends(scenario: Scenario, changed: bool) -> None:
    scenario.cluster.edit(suspend=True)
    scenario.go(3)
    assert scenario.cluster.trainer()["status"]["active"] == 0  # type: ignore[index]
    assert len(scenario.cluster.pods(Role.TRAINER)) == 1
    if changed:
        recipe = scenario.cluster.objects["PolyRLJob", "j"]["spec"]["recipe"]
        steps = recipe["algorithm"] | {"steps": recipe["algorithm"]["steps"] + 1}
        scenario.cluster.edit(suspend=False, recipe=recipe | {"algorithm": steps})
    else:
        scenario.cluster.edit(suspend=False)
    for _ in range(90):
        scenario.go(1)
        assert sum(not is_ended(pod) for pod in scenario.cluster.pods(Role.TRAINER)) <= 1
    assert scenario.status.state == "Running"
    assert scenario.status.trainer.disruptions == 0


def test_deadline_counts_running_time_only() -> None:
    scenario = running(raw_job(activeDeadlineSeconds=100), seconds=50)
    scenario.cluster.edit(suspend=True)
    scenario.go(500, every=10)
    scenario.cluster.edit(suspend=False)
    scenario.go(40)
    assert scenario.status.state == "Running"
    scenario.go(30)
    assert scenario.status.state == "Failed"
    assert scenario.reason("Failed") == "DeadlineExceeded"
    scenario.go(60)
    assert scenario.cluster.pods() == []
    assert ("Job", "j-trainer") in scenario.cluster.objects


def test_rollouts_that_overrun_their_own_volumes_are_failures_and_follow_ever_slower() -> None:
    """The kubelet evicts such a pod without the condition DisruptionTarget."""
    scenario = running(raw_job({"replicas": 1, "minReplicas": 0, "maxReplicas": 1}), seconds=0)
    scenario.cluster.unheard |= {f"j-r-{number}" for number in range(100)}
    for _ in range(60):
        scenario.go(10)
        for name in scenario.names():
            if scenario.pod(name)["status"]["phase"] == "Running":
                scenario.cluster.end_pod(name, 137, "Evicted")
    rollout = scenario.status.rollout
    assert rollout.preemptions == 0
    assert 3 <= rollout.failures < 10, "10 s to 5 min apart"
    assert any("wrote more than a volume" in event.message for event in scenario.operator.message)


def test_an_eviction_for_the_nodes_sake_is_a_preemption(scenario: Scenario) -> None:
    scenario.cluster.end_pod("j-r-1", 137, "Evicted", disruption="TerminationByKubelet")
    scenario.go(5)
    assert (scenario.status.rollout.preemptions, scenario.status.rollout.failures) == (1, 0)


def test_a_refusal_of_what_is_wanted_no_longer_holds_up_no_replacement(scenario: Scenario) -> None:
    now = scenario.cluster.now
    scenario.operator.state = scenario.operator.state.with_refusal("NetworkPolicy j-rollout: no", now, of_pods=False)
    scenario.delete("j-r-1", 0)
    scenario.go(5)
    assert scenario.names() == ["j-r-2", "j-r-3", "j-r-4"]


def hourly_price(scenario: Scenario) -> float:
    """Of rollouts that hold a node and were not asked to go."""
    pods = [pod for pod in scenario.cluster.pods(Role.ROLLOUT) if "deletionTimestamp" not in pod["metadata"]]
    on_nodes = [pod for pod in pods if pod["spec"].get("nodeName") and not is_ended(pod)]
    return sum(PRICES[pod["metadata"]["labels"][names.LABEL_POOL]] for pod in on_nodes)


PRICES = {"spot": 1.0, "on-demand": 3.0}
BUDGET = 6.0


def test_spot_that_comes_back_beside_stand_ins_is_within_the_budget_while_it_still_starts() -> None:
    capacity = {"policy": "SpotPreferred", "fallback": {"enabled": True, "afterSeconds": 30}}
    fleet = {"replicas": 2, "minReplicas": 0, "pendingTimeoutSeconds": 60, "capacity": capacity}
    scaling = {"mode": "Manual", "objective": "ThroughputUnderBudget", "budgetPerHour": BUDGET}
    prices = {"spotPerHour": PRICES["spot"], "onDemandPerHour": PRICES["on-demand"]}
    scenario = Scenario(raw_job(fleet, scaling=scaling, pricing=prices))
    scenario.cluster.room["spot"] = 0
    scenario.go(200)
    assert hourly_price(scenario) == BUDGET, "two stand-ins"
    scenario.cluster.unheard |= {f"j-r-{number}" for number in range(4, 100)}
    scenario.cluster.room["spot"] = 8
    prices_seen = []
    for _ in range(100):
        scenario.go(1)
        prices_seen.append(hourly_price(scenario))
    assert sum(price > BUDGET for price in prices_seen) <= 1, "but for the reconcile that sees it"


def test_manager_is_replaced_when_it_ended_or_is_gone(scenario: Scenario) -> None:
    scenario.cluster.end_pod("j-manager-1", 1, "Evicted")
    scenario.go(15)
    assert scenario.names(Role.MANAGER) == ["j-manager-2"]
    scenario.delete("j-manager-2", 0)
    scenario.go(5)
    assert scenario.names(Role.MANAGER) == ["j-manager-3"]
    assert scenario.status.manager.created == 3
    assert scenario.names() == ["j-r-1", "j-r-2", "j-r-3"], "rollouts wait for it"


def test_new_manager_waits_until_the_old_one_cannot_write(scenario: Scenario) -> None:
    scenario.cluster.silence_node(scenario.pod("j-manager-1")["spec"]["nodeName"])
    scenario.go(30)
    assert scenario.names(Role.MANAGER) == ["j-manager-1"]
    assert scenario.reason("TrainerReady") == "ManagerUnreachable"
    assert scenario.status.state == "Degraded"
    scenario.go(60)
    assert scenario.names(Role.MANAGER) == ["j-manager-2"]


def test_fleet_follows_the_gap(scenario: Scenario) -> None:
    scenario.step(30.0)
    assert scenario.status.rollout.desired_replicas == 5
    scenario.go(15)
    assert scenario.status.rollout.registered_replicas == 5
    assert "3 -> 5" in scenario.status.scaling.last_reason
    assert scenario.reason("ScalingActive") == "Measured"
    for _ in range(5):  # what most of the newest five took, three times in a row
        scenario.go(40)
        scenario.step(5.0)
    assert scenario.status.rollout.desired_replicas == 4
    scenario.go(15)
    assert len(scenario.names()) == 4
    assert scenario.message()["RolloutScaledUp"] == scenario.message()["RolloutScaledDown"] == 1
    scenario.go(1000, every=20)
    assert scenario.reason("ScalingActive") == "MetricsStale"


def test_written_replicas_move_nothing_in_mode_gap_and_say_so(scenario: Scenario) -> None:
    scenario.cluster.edit(rollout=scenario.cluster.objects["PolyRLJob", "j"]["spec"]["rollout"] | {"replicas": 5})
    scenario.go(10)
    assert len(scenario.names()) == 3
    assert scenario.message()["ReplicasIgnored"] == 1


def test_spot_goes_and_comes_back() -> None:
    capacity = {"policy": "SpotPreferred", "fallback": {"enabled": True, "afterSeconds": 60}}
    scenario = running(raw_job({"capacity": capacity, "pendingTimeoutSeconds": 120, "maxReplicas": 3}))
    scenario.cluster.room[Pool.SPOT.value] = 0
    for name in scenario.names():
        scenario.delete(name, 0)
    scenario.go(100)
    status = scenario.status.rollout
    assert (status.on_demand_replicas, status.registered_replicas) == (3, 3)
    scenario.go(100)
    assert scenario.status.rollout.pending_replicas == 1, "one probe"
    assert scenario.reason("CapacityLimited") == "SpotUnavailable"
    assert scenario.message()["FallbackOnDemand"] >= 1
    scenario.cluster.room[Pool.SPOT.value] = 100
    scenario.go(120)
    status = scenario.status.rollout
    assert (status.spot_replicas, status.on_demand_replicas, status.registered_replicas) == (3, 0, 3)
    assert scenario.reason("CapacityLimited") == "Enough"


@pytest.mark.slow
def test_no_capacity_for_two_hours_then_it_returns() -> None:
    scenario = running(raw_job({"replicas": 5, "maxReplicas": 5}), seconds=5)
    scenario.cluster.room[Pool.SPOT.value] = 0
    for name in scenario.names():
        scenario.delete(name, 0)
    scenario.go(1210, every=10)
    for _ in range(60):
        scenario.go(100, every=20)
        assert len(scenario.names()) == 1
    assert scenario.status.state == "Running", "zero rollouts is a normal state"
    assert scenario.status.rollout.pools[0].state == "BackingOff"
    scenario.cluster.room[Pool.SPOT.value] = 100
    scenario.go(60)
    assert scenario.status.rollout.registered_replicas == 5


def test_who_was_pushed_out_does_not_push_back(scenario: Scenario) -> None:
    """Where a pod of higher priority took the room, asking at once would only lose again."""
    for name in scenario.names():
        scenario.cluster.end_pod(name, 143, disruption="PreemptionByScheduler")
    scenario.cluster.room[Pool.SPOT.value] = 0
    done = scenario.go(50)
    assert len(of(done, Create)) == 1, "one probe"
    assert scenario.reason("CapacityLimited") == "SpotUnavailable"
    assert scenario.status.rollout.preemptions == 3
    scenario.cluster.room[Pool.SPOT.value] = 100
    scenario.go(20)
    assert len(scenario.names()) == 3


def test_notice_that_was_seen_late_still_gets_its_time(scenario: Scenario) -> None:
    node = scenario.pod("j-r-2")["spec"]["nodeName"]
    scenario.cluster.taint_node(node, "ToBeDeletedByClusterAutoscaler")
    scenario.cluster.pass_time(300)
    (drain,) = of(scenario.go(0), DrainEngine)
    assert drain.deadline_s == 5
    assert not [one for one in of(scenario.go(12), Delete) if one.name == "j-r-2"]
    assert [one.name for one in of(scenario.go(8), Delete)] == ["j-r-2"], "gone by then, or we end it"


def test_pod_that_never_registers_is_replaced_as_a_failure() -> None:
    scenario = running(raw_job({"replicas": 1, "maxReplicas": 1, "startupTimeoutSeconds": 100}), seconds=2)
    scenario.cluster.unheard.add("j-r-1")
    scenario.go(99)
    assert scenario.names() == ["j-r-1"]
    scenario.go(20)
    assert scenario.status.rollout.failures == 1
    assert scenario.message()["RolloutFailed"] == 1


def test_disrupted_trainer_is_counted_once(scenario: Scenario) -> None:
    (pod,) = scenario.names(Role.TRAINER)
    scenario.cluster.end_pod(pod, 143, disruption="EvictionByEvictionAPI")
    scenario.go(20)
    assert scenario.status.trainer.disruptions == 1
    assert scenario.status.state == "Running"
    assert not of(scenario.go(10), Annotate)


def test_cost_is_pod_seconds_at_the_prices() -> None:
    prices = {"spotPerHour": 3.6, "onDemandPerHour": 36.0, "reservedPerHour": 7.2}
    scenario = running(raw_job(pricing=prices), seconds=20)
    scenario.go(1980, every=20)
    scenario.cluster.end_trainer("Complete")
    scenario.turn()
    cost = scenario.status.cost
    assert cost.spot_micros == pytest.approx(2000 * 3 * 1000, rel=0.01)
    assert cost.reserved_micros == pytest.approx(2000 * 2000, rel=0.01)
    assert cost.on_demand_micros == 0
    scenario.go(200)
    assert scenario.status.cost == cost


def test_children_are_mended_and_leave_when_no_longer_asked_for(scenario: Scenario) -> None:
    scenario.cluster.drop("Service", "j-manager")
    scenario.cluster.patch("PodDisruptionBudget", "j-trainer", {"metadata": {"name": "j-trainer", "uid": "x"}})
    scenario.go(2)
    assert ("Service", "j-manager") in scenario.cluster.objects
    mended = scenario.cluster.objects["PodDisruptionBudget", "j-trainer"]
    assert mended["metadata"]["annotations"][names.ANNOTATION_CONTENT]
    scenario.cluster.edit(podDisruptionBudget={"trainer": "None"})
    scenario.go(2)
    assert ("PodDisruptionBudget", "j-trainer") not in scenario.cluster.objects


def test_job_that_samples_nothing_has_a_trainer_only() -> None:
    job = raw_job()
    job["spec"]["recipe"] = {
        "mode": "sft",
        "model": {"path": "/model"},
        "data": {"sft": [{"path": "a.jsonl"}]},
        "sft": {"steps": 5},
    }
    scenario = running(job)
    assert {pod["metadata"]["labels"][names.LABEL_ROLE] for pod in scenario.cluster.pods()} == {"trainer"}
    assert ("Secret", "j-keys") not in scenario.cluster.objects
    assert scenario.status.state == "Running"


def test_new_operator_takes_over_in_silence(scenario: Scenario) -> None:
    scenario.delete("j-r-1", 0)
    scenario.go(30)
    before = scenario.status
    scenario.operator = FakeOperator(scenario.cluster, dry_run=None)
    assert scenario.turn().actions == ()
    assert scenario.status == before
