"""Conditions, Events and the state in one word, from one reconcile's result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct

from polyrl.cluster.actions import ReconcileResult, RecordEvent
from polyrl.cluster.observation.facts import PodPhase
from polyrl.cluster.reconcile import reconcile
from polyrl.cluster.reporting.conditions import SHORTEST_STALL_S
from polyrl.cluster.state import LastSeenPod, ReconcileState, Refusal
from polyrl.cluster.timestamps import millisecond, second
from polyrl.sample import Pool
from polyrl.status import FetchStatus
from polyrl.testing.fake_operator import SETTINGS
from polyrl.worker import Role


def result(build: Any, state: ReconcileState | None = None, **facts: Any) -> ReconcileResult:
    """Of a job that runs, was accepted before, and has a trainer and a manager unless `facts` say otherwise."""
    accepted = {"type": "Accepted", "status": "True", "reason": "Valid", "message": "m", "observedGeneration": 1}
    accepted["lastTransitionTime"] = second(build.now - 900)
    stored = {"startTime": second(build.now - 900), "conditions": [accepted], "state": "Running"}
    facts = {"trainer": build.trainer(), "manager": build.manager()} | facts
    facts["status"] = stored | facts.pop("status", {})
    return reconcile(build.facts(**facts), SETTINGS, state or ReconcileState(), build.now)


def reasons(found: ReconcileResult) -> dict[str, tuple[str, str]]:
    return {known.type: (known.status, known.reason) for known in found.status.conditions}


def events(found: ReconcileResult) -> dict[str, str]:
    return {action.reason: action.message for action in found.actions if isinstance(action, RecordEvent)}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        pytest.param({}, ("True", "Ready"), id="ready"),
        pytest.param({"trainer": {"ready": 0}}, ("False", "Starting"), id="starting"),
        pytest.param({"trainer": {"ready": 0, "failed": 2}}, ("False", "CrashLoop"), id="failed before"),
        pytest.param({"manager": {"failed_polls": 3}}, ("False", "ManagerUnreachable"), id="no manager"),
        pytest.param({"spec": {"suspend": True}}, ("False", "Suspended"), id="suspended"),
        pytest.param({"trainer": {"complete_at": 9.0}}, ("False", "Finished"), id="ended"),
    ],
)
def test_trainer_ready(build: Any, facts: dict[str, dict[str, Any]], expected: tuple[str, str]) -> None:
    found = result(
        build,
        job=build.job(**facts.get("spec", {})),
        trainer=build.trainer(**facts.get("trainer", {})),
        manager=build.manager(**facts.get("manager", {})),
    )
    assert reasons(found)["TrainerReady"] == expected


@pytest.mark.parametrize("role", [Role.TRAINER, Role.MANAGER], ids=["trainer", "manager"])
def test_trainer_waits_for_an_image(build: Any, role: Role) -> None:
    """Also where no kubelet could ever pull it; the sentence stays the same while kubelets try again and again."""
    pod = build.pod(f"j-{role.value}-1", role, phase=PodPhase.PENDING, unpulled="polyrl.test/own:1")
    waits = {"trainer": build.trainer(ready=0), "manager": None}
    found = result(build, pods=(pod,), **waits)
    assert reasons(found)["TrainerReady"] == ("False", "ImageNotPulled")
    sentence = (
        f"{pod.name} cannot pull polyrl.test/own:1: push it, or name another in the template or the chart's images"
    )
    assert [one.message for one in found.status.conditions if one.type == "TrainerReady"] == [sentence]
    assert events(found)["ImageNotPulled"] == sentence
    again = {"status": {"conditions": [one.model_dump(by_alias=True) for one in found.status.conditions]}}
    assert "ImageNotPulled" not in events(result(build, pods=(pod,), **waits, **again))
    pulled = result(build, pods=(replace(pod, unpulled=""),), **waits)
    assert reasons(pulled)["TrainerReady"] == ("False", "Starting")
    later = build.pod(f"j-{role.value}-2", role, age=1.0)
    assert reasons(result(build, pods=(pod, later), **waits))["TrainerReady"] == ("False", "Starting")


@pytest.mark.parametrize("role", [Role.TRAINER, Role.MANAGER], ids=["trainer", "manager"])
@pytest.mark.parametrize(
    ("field", "reason"), [("crashes", "CrashLoop"), ("unstarted", "Starting")], ids=["ends again", "cannot start"]
)
def test_a_container_that_does_not_come_to_run_is_said(build: Any, role: Role, field: str, reason: str) -> None:
    """The trainer starts, it said for ever, where the manager's memory was too small or a Secret was not there."""
    pod = build.pod(f"j-{role.value}-1", role, **{field: "container x does what it does" + "." * 2000})
    others = [build.pod(f"j-{one.value}-1", one) for one in (Role.TRAINER, Role.MANAGER) if one is not role]
    found = result(build, pods=(pod, *others), trainer=build.trainer(ready=1), manager=None)
    assert reasons(found)["TrainerReady"] == ("False", reason)
    (message,) = [one.message for one in found.status.conditions if one.type == "TrainerReady"]
    assert message.startswith(f"{pod.name}: container x does what it does")
    assert len(message) < 400
    ended = replace(pod, phase=PodPhase.FAILED)
    assert "container x" not in str(result(build, pods=(ended, *others), trainer=build.trainer(), manager=None).status)
    ready = result(build, pods=(pod, *others), trainer=build.trainer(ready=1), manager=build.manager())
    assert reasons(ready)["TrainerReady"] == ("True", "Ready")


@pytest.mark.parametrize("role", [Role.TRAINER, Role.MANAGER], ids=["trainer", "manager"])
def test_trainer_waits_for_a_node(build: Any, role: Role) -> None:
    """The trainer starts, it said, for ever."""
    pod = build.pod(f"j-{role.value}-1", role, placed=None, unschedulable="0/5 nodes are available")
    waits = {"trainer": build.trainer(ready=0), "manager": None}
    found = result(build, pods=(pod,), **waits)
    assert reasons(found)["TrainerReady"] == ("False", "Unschedulable")
    sentences = [one.message for one in found.status.conditions if one.type == "TrainerReady"]
    assert sentences == [f"{pod.name} waits for a node: 0/5 nodes are available"]
    ended = replace(pod, phase=PodPhase.FAILED)
    assert reasons(result(build, pods=(ended,), **waits))["TrainerReady"] == ("False", "Starting")


@pytest.mark.parametrize(
    ("deletion_at", "todo"),
    [(None, ": delete j-trainer-0-x, for no Job of this job's has it"), (2e6, "")],
    ids=["it runs on", "it ends"],
)
def test_a_pod_that_outlives_the_trainer_s_job_is_named(build: Any, deletion_at: float | None, todo: str) -> None:
    pod = build.pod("j-trainer-0-x", Role.TRAINER, deletion_at=deletion_at)
    found = result(build, pods=(pod,), trainer=None)
    assert reasons(found)["TrainerReady"] == ("False", "PodWithoutJob")
    (message,) = [one.message for one in found.status.conditions if one.type == "TrainerReady"]
    assert message == f"j-trainer-0-x has not ended, and another trainer starts once it has{todo}"
    suspended = result(build, job=build.job(suspend=True), pods=(pod,), trainer=None)
    (message,) = [one.message for one in suspended.status.conditions if one.type == "Suspended"]
    assert message == f"spec.suspend is true; pods that have not ended: 1{todo}"


def test_a_model_that_is_fetched_is_progress(build: Any) -> None:
    pod = build.pod("j-trainer-0-x", Role.TRAINER, phase=PodPhase.PENDING, fetching=True)
    found = result(build, pods=(pod,), trainer=build.trainer(ready=0))
    assert reasons(found)["TrainerReady"] == ("False", "FetchingModel")
    (message,) = [one.message for one in found.status.conditions if one.type == "TrainerReady"]
    assert message.endswith("; kubectl logs j-trainer-0-x -c fetch tells how much has come")
    done = result(build, pods=(replace(pod, fetching=False),), trainer=build.trainer(ready=0))
    assert reasons(done)["TrainerReady"] == ("False", "Starting")


def test_a_fetch_says_how_much_has_come_as_its_pod_reported(build: Any) -> None:
    pods = tuple(build.pod(f"j-trainer-{n}-x", Role.TRAINER, phase=PodPhase.PENDING, fetching=True) for n in range(2))
    ours = FetchStatus(pod="j-trainer-1-x", place="hf://o/n", fetched=3_210_000_000, total=14_900_000_000)
    others = replace_struct(ours, pod="j-trainer-9-x", fetched=1)
    manager = build.manager(fetches=(others, ours))
    found = result(build, pods=pods, trainer=build.trainer(ready=0), manager=manager)
    (message,) = [one.message for one in found.status.conditions if one.type == "TrainerReady"]
    assert message == "j-trainer-1-x has fetched 3.2 of 14.9 GB of what its job named"


@pytest.mark.parametrize(
    ("fetched", "total", "amount"),
    [(0, 0, "0.0 kB"), (2_500_000, 0, "2.5 MB"), (0, 1_200, "0.0 of 1.2 kB"), (999, 2 * 10**9, "0.0 of 2.0 GB")],
    ids=["nothing", "an unknown whole", "little", "much"],
)
def test_an_amount_is_said_in_the_unit_of_the_whole(fetched: int, total: int, amount: str) -> None:
    assert FetchStatus(pod="p", place="x", fetched=fetched, total=total).amount == amount


def test_rollouts_wait_for_an_image(build: Any) -> None:
    pod = build.pod(phase=PodPhase.PENDING, unpulled="polyrl.test/rollout:" + "1" * 2000)
    found = result(build, job=build.job({"replicas": 1}, scaling={"mode": "Manual"}), pods=(pod,))
    assert reasons(found)["RolloutAvailable"] == ("False", "ImageNotPulled")
    (message,) = [one.message for one in found.status.conditions if one.type == "RolloutAvailable"]
    assert message.startswith("j-r-1 cannot pull polyrl.test/rollout:111")
    assert message.endswith("push it, or name another in the template or the chart's images")


@pytest.mark.parametrize(
    ("engines", "minimum", "desired", "expected"),
    [
        pytest.param(0, 0, 0, ("False", "NotWanted"), id="none are desired"),
        pytest.param(1, 0, 3, ("True", "Registered"), id="one is enough"),
        pytest.param(1, 2, 3, ("False", "BelowMinimum"), id="fewer than minReplicas"),
    ],
)
def test_rollout_available(build: Any, engines: int, minimum: int, desired: int, expected: tuple[str, str]) -> None:
    pods = tuple(build.pod(f"j-r-{n}") for n in range(engines))
    job = build.job({"replicas": desired, "minReplicas": minimum}, scaling={"mode": "Manual"})
    found = result(build, job=job, pods=pods, manager=build.manager([pod.name for pod in pods]))
    assert reasons(found)["RolloutAvailable"] == expected


@pytest.mark.parametrize(
    ("ago", "expected"),
    [pytest.param(1.0, "StepAdvanced", id="in time"), pytest.param(SHORTEST_STALL_S, "Stalled", id="stalled")],
)
def test_progressing(build: Any, ago: float, expected: str) -> None:
    step = {"step": 5, "stepTime": millisecond(build.now - ago)}
    found = result(build, status={"manager": step}, manager=build.manager(step=5, phase="rl"))
    assert reasons(found)["Progressing"][1] == expected
    assert ("Stalled" in events(found)) == (expected == "Stalled")


@pytest.mark.parametrize(
    ("message", "expected"),
    [("exceeded quota: pods", "QuotaExceeded"), ("a webhook said no", "Refused")],
    ids=["quota", "webhook"],
)
def test_capacity_limited_by_the_api_server(build: Any, message: str, expected: str) -> None:
    job = build.job(scaling={"mode": "Manual"})
    found = result(build, ReconcileState(refusal=Refusal(message, build.now)), job=job)
    assert reasons(found)["CapacityLimited"] == ("True", expected)
    assert events(found)["CapacityUnavailable"] == message


def test_what_the_api_server_refuses_to_pods_that_are_there_is_said_as_well(build: Any) -> None:
    """A rollout without keys of its own was a pool that backs off, of a job whose others served."""
    pods = tuple(build.pod(f"j-r-{n}") for n in range(3))
    state = ReconcileState(refusal=Refusal("delete the Secrets j-keys-manager", build.now, of_pods=False))
    found = result(build, state, job=build.job(scaling={"mode": "Manual"}), pods=pods)
    assert reasons(found)["CapacityLimited"] == ("True", "Refused")
    assert "delete the Secrets j-keys-manager" in events(found)["CapacityUnavailable"]


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        pytest.param(9, ("True", "TooManyReplicas"), id="above"),
        pytest.param(1, ("True", "TooFewReplicas"), id="below"),
        pytest.param(3, ("False", "WithinBounds"), id="between"),
    ],
)
def test_scaling_limited(build: Any, requested: int, expected: tuple[str, str]) -> None:
    job = build.job({"replicas": requested, "minReplicas": 2}, scaling={"mode": "Manual"})
    assert reasons(result(build, job=job))["ScalingLimited"] == expected


@pytest.mark.parametrize(
    ("mode", "asked", "expected"),
    [
        pytest.param("Manual", 4, ("True", "OverBudget"), id="the user wants four"),
        pytest.param("Manual", 2, ("False", "WithinBounds"), id="the user wants two"),
        pytest.param("Gap", 2, ("True", "OverBudget"), id="the gap asks for all that it may"),
        pytest.param("Gap", 1, ("False", "WithinBounds"), id="the gap asks for less"),
    ],
)
def test_a_budget_that_holds_the_number_is_said(build: Any, mode: str, asked: int, expected: tuple[str, str]) -> None:
    """Of four that were wanted two came, and the number was "within minReplicas and maxReplicas"."""
    scaling = {"mode": mode, "objective": "ThroughputUnderBudget", "budgetPerHour": 2.5}
    job = build.job({"replicas": asked}, scaling=scaling, pricing={"spotPerHour": 1.0, "onDemandPerHour": 3.0})
    measured = {"recommendedReplicas": asked, "lastStepTime": second(build.now)}
    assert reasons(result(build, job=job, status={"scaling": measured}))["ScalingLimited"] == expected


def test_disruption_is_reported_counted_and_listed(build: Any) -> None:
    pod = build.pod("j-r-1", disruption="EvictionByEvictionAPI")
    found = result(build, pods=(pod,))
    assert reasons(found)["Disrupting"] == ("True", "Eviction")
    assert events(found)["RolloutPreempted"] == "1 rollouts are taken away: 1 Eviction (j-r-1)"
    gone = LastSeenPod("j-r-9", Role.ROLLOUT, pool=None, node="n", settled=False, runs_since=None)
    after = result(build, ReconcileState(last_seen={"u9": gone})).status
    assert [(one.pod_name, one.reason) for one in after.recent_disruptions] == [("j-r-9", "PodDeleted")]
    assert after.rollout.preemptions == 1


def test_failure_is_an_event_with_its_reason(build: Any) -> None:
    pod = build.pod("j-r-1", phase=PodPhase.FAILED)
    assert events(result(build, pods=(pod,)))["RolloutFailed"].startswith("1 rollouts failed: ")


@pytest.mark.parametrize(
    ("stored", "trainer", "expected"),
    [("Pending", {"ready": 0}, "Pending"), ("Running", {"ready": 0}, "Degraded"), ("Pending", {}, "Running")],
    ids=["never ready", "ready before", "ready"],
)
def test_state_in_one_word(build: Any, stored: str, trainer: dict[str, Any], expected: str) -> None:
    found = result(build, status={"state": stored}, trainer=build.trainer(**trainer))
    assert found.status.state == expected


def test_a_second_reconcile_of_the_same_facts_records_no_event(build: Any) -> None:
    job, observed = build.job({"replicas": 0}), {"trainer": build.trainer(), "manager": build.manager()}
    first = result(build, job=job, **observed)
    stored = first.status.model_dump(by_alias=True, exclude_none=True)
    again = reconcile(build.facts(job, stored, **observed), SETTINGS, first.state, build.now)
    assert events(again) == {}
    assert again.status == first.status


PRICES = {"reservedPerHour": 3.6, "spotPerHour": 1.8, "onDemandPerHour": 7.2}


def test_cost_of_seconds_on_nodes(build: Any) -> None:
    """100 s on a node each: the trainer's at 3600 seconds an hour, spot at half its price, on-demand at twice."""
    pods = (build.pod("t", Role.TRAINER), build.pod("j-r-1"), build.pod("j-r-2", pool=Pool.ON_DEMAND))
    pods = tuple(replace(pod, scheduled_at=build.now - 100) for pod in pods)
    status = {"cost": {"accountedTime": millisecond(build.now - 100)}}
    cost = result(build, job=build.job(pricing=PRICES), pods=pods, status=status).status.cost
    assert (cost.reserved_micros, cost.spot_micros, cost.on_demand_micros) == (100_000, 50_000, 200_000)
    recent = {"cost": {"accountedTime": millisecond(build.now - 10)}}
    assert result(build, job=build.job(pricing=PRICES), pods=pods, status=recent).status.cost.spot_micros == 0
