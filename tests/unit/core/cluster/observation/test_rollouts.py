"""How one rollout stands, by what its pod, its node and the manager say: a row each."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from polyrl.cluster import names
from polyrl.cluster.observation.facts import Exit, ManagerFacts, PodPhase
from polyrl.cluster.observation.rollouts import LEASE_LOST_S, QUIET_S, SILENT_S, PodState, next_due, rollouts
from polyrl.cluster.state import ReconcileState
from polyrl.status import EngineState, ManagerStatus

NAME, UID = "j-r-1", "uid-j-r-1"
KNOWN = ReconcileState(registered=frozenset({UID}), began_at=0.0)
ENDED = {"phase": PodPhase.SUCCEEDED, "exits": (Exit("rollout", 0, reason="Completed"),)}
OOM = {"phase": PodPhase.FAILED, "exits": (Exit("rollout", 137, reason="OOMKilled"),)}


def stands(build: Any, pod: dict[str, Any], *, state: ReconcileState = KNOWN, **facts: Any) -> Any:
    made = build.pod(NAME, **pod)
    facts.setdefault("manager", build.manager([NAME]))
    (one,) = rollouts(build.ctx(state=state, pods=(made,), **facts))
    return one


@pytest.mark.parametrize(
    ("pod", "state"),
    [
        pytest.param({"placed": None}, PodState.PENDING, id="no node"),
        pytest.param({}, PodState.SERVING, id="it serves"),
        pytest.param({"annotations": {names.ANNOTATION_RELEASED: "why"}}, PodState.DELETING, id="released"),
        pytest.param({"annotations": {names.ANNOTATION_COUNTED: "failure-3"}}, PodState.FAILED, id="counted as failed"),
        pytest.param({"disruption": "EvictionByEvictionAPI"}, PodState.PREEMPTED, id="evicted"),
        pytest.param(OOM, PodState.FAILED, id="out of memory"),
        pytest.param(
            OOM | {"disruption": "TerminationByKubelet"}, PodState.PREEMPTED, id="out of memory as its node was"
        ),
        pytest.param(ENDED, PodState.PREEMPTED, id="it ended well long ago"),
        pytest.param(ENDED | {"ended_at": 1_000_000.0 - QUIET_S + 1}, PodState.EXITED, id="it ended well just now"),
        pytest.param(ENDED | {"ended_at": 1_000_000.0 - QUIET_S}, PodState.PREEMPTED, id="no longer just now"),
        pytest.param(
            {"phase": PodPhase.FAILED, "reason": "UnexpectedAdmissionError"},
            PodState.FAILED,
            id="the kubelet refused it",
        ),
    ],
)
def test_by_the_pod(build: Any, pod: dict[str, Any], state: PodState) -> None:
    assert stands(build, pod).state is state


def test_failures_say_what_failed(build: Any) -> None:
    assert stands(build, OOM).why == "container rollout ended with status 137 (OOMKilled)"
    refused = stands(build, {"phase": PodPhase.FAILED, "reason": "UnexpectedAdmissionError"})
    assert refused.why == "the kubelet refused it: UnexpectedAdmissionError"
    quick = stands(build, ENDED | {"age": 20.0}, state=ReconcileState())
    assert (quick.state, quick.why) == (PodState.FAILED, "it ended with status 0 before it was of use")


@pytest.mark.parametrize(
    ("silent_s", "node_ready", "expected"),
    [
        pytest.param(0, True, PodState.STARTING, id="just now"),
        pytest.param(SILENT_S - 1, True, PodState.STARTING, id="not long enough"),
        pytest.param(SILENT_S, True, PodState.FAILED, id="too long"),
        pytest.param(LEASE_LOST_S - 1, False, PodState.STARTING, id="on a silent node, just now"),
        pytest.param(LEASE_LOST_S, False, PodState.PREEMPTED, id="on a silent node, its lease is over"),
        pytest.param(SILENT_S, False, PodState.PREEMPTED, id="on a silent node, for long"),
    ],
)
def test_engine_that_the_manager_lost(build: Any, silent_s: float, node_ready: bool, expected: PodState) -> None:
    state = ReconcileState(registered=frozenset({UID}), silent_since={UID: build.now - silent_s}, began_at=0.0)
    nodes = build.nodes(build.pod(NAME), ready=node_ready)
    one = stands(build, {}, state=state, manager=build.manager([]), nodes=nodes)
    assert one.state is expected
    silent = replace(build.engine(NAME), state=EngineState.SILENT)
    manager = ManagerFacts(ManagerStatus(seq=1, run_epoch=1, engines=(silent,)), build.now)
    assert stands(build, {}, state=state, manager=manager, nodes=nodes).state is expected, "one that it lists as silent"


@pytest.mark.parametrize(
    "manager",
    [
        pytest.param(None, id="no manager"),
        pytest.param({"failed_polls": 3}, id="it does not answer"),
        pytest.param({"ago": 200.0}, id="its answer is old"),
    ],
)
def test_silence_of_the_manager_proves_nothing_about_engines(build: Any, manager: dict[str, Any] | None) -> None:
    state = ReconcileState(registered=frozenset({UID}), silent_since={UID: 0.0}, began_at=0.0)
    manager = None if manager is None else build.manager([], **manager)
    assert stands(build, {}, state=state, manager=manager).state is PodState.SERVING


@pytest.mark.parametrize(
    ("placed", "watched_s", "expected"),
    [
        pytest.param(1799.0, 5000.0, PodState.STARTING, id="in time"),
        pytest.param(1800.0, 5000.0, PodState.FAILED, id="too late"),
        pytest.param(
            1800.0, SILENT_S - 1, PodState.STARTING, id="A new operator beside a new manager knows nobody yet."
        ),
        pytest.param(1800.0, SILENT_S, PodState.FAILED, id="too late, and the operator knows"),
    ],
)
def test_startup_timeout(build: Any, placed: float, watched_s: float, expected: PodState) -> None:
    state = ReconcileState(began_at=build.now - watched_s)
    one = stands(build, {"age": placed, "placed": placed}, state=state, manager=build.manager([]))
    assert one.state is expected


def test_an_agent_that_leaves_by_itself_was_notified_by_its_machine(build: Any) -> None:
    draining = (replace(build.engine(NAME), state=EngineState.DRAINING),)
    status = ManagerStatus(seq=1, run_epoch=1, engines=draining)
    one = stands(build, {}, manager=ManagerFacts(status, build.now))
    assert one.state is PodState.PREEMPTED
    assert one.notice.kind == "Unknown"
    over = replace(status, finished=True)
    assert stands(build, {}, manager=ManagerFacts(over, build.now)).state is PodState.SERVING


def test_ends_after_the_goodbye_are_nobodys_loss(build: Any) -> None:
    assert stands(build, ENDED, manager=build.manager([], finished=True)).state is PodState.DELETING


def test_next_moment_is_the_earliest_of_theirs(build: Any) -> None:
    starting = build.pod("j-r-1", placed=100.0)
    left = build.pod("j-r-2", **ENDED, ended_at=build.now - 4)
    ctx = build.ctx(pods=(starting, left), manager=build.manager([]), state=ReconcileState(began_at=0.0))
    assert next_due(rollouts(ctx), ctx) == build.now + QUIET_S - 4
    ctx = build.ctx(pods=(starting,), manager=build.manager([]), state=ReconcileState(began_at=0.0))
    assert next_due(rollouts(ctx), ctx) == build.now + 1700
    unseen = build.pod("j-r-3")
    absent = ReconcileState(absent_since={"n-j-r-3": build.now - 20})
    ctx = build.ctx(pods=(unseen,), nodes={}, manager=build.manager(["j-r-3"]), state=absent)
    assert next_due(rollouts(ctx), ctx) == build.now + 40
