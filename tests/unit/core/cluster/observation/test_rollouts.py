"""How one rollout stands, by what its pod, its node and the manager say: a row each."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from polyrl.cluster import names
from polyrl.cluster.observation.endings import SILENT_S
from polyrl.cluster.observation.facts import Exit, ManagerFacts, PodPhase
from polyrl.cluster.observation.rollouts import LEASE_LOST_S, QUIET_S, Standing, next_due, rollouts
from polyrl.cluster.state import Memory
from polyrl.status import EngineState, ManagerStatus

NAME, UID = "j-r-1", "uid-j-r-1"
KNOWN = Memory(registered=frozenset({UID}), began_at=0.0)
ENDED = {"phase": PodPhase.SUCCEEDED, "exits": (Exit("rollout", 0, "Completed"),)}
OOM = {"phase": PodPhase.FAILED, "exits": (Exit("rollout", 137, "OOMKilled"),)}


def stands(build: Any, pod: dict[str, Any], *, memory: Memory = KNOWN, **facts: Any) -> Any:
    made = build.pod(NAME, **pod)
    facts.setdefault("manager", build.manager([NAME]))
    (one,) = rollouts(build.look(memory=memory, pods=(made,), **facts))
    return one


@pytest.mark.parametrize(
    ("pod", "standing"),
    [
        ({"placed": None}, Standing.WAITING),
        ({}, Standing.SERVING),
        ({"annotations": {names.ANNOTATION_RELEASED: "why"}}, Standing.RELEASED),
        ({"annotations": {names.ANNOTATION_COUNTED: "failure-3"}}, Standing.FAILED),
        ({"disruption": "EvictionByEvictionAPI"}, Standing.TAKEN),
        (OOM, Standing.FAILED),
        (OOM | {"disruption": "TerminationByKubelet"}, Standing.TAKEN),
        (ENDED, Standing.TAKEN),
        (ENDED | {"ended_at": 1_000_000.0 - QUIET_S + 1}, Standing.LEFT),
        (ENDED | {"ended_at": 1_000_000.0 - QUIET_S}, Standing.TAKEN),
        ({"phase": PodPhase.FAILED, "reason": "UnexpectedAdmissionError"}, Standing.FAILED),
    ],
)
def test_by_the_pod(build: Any, pod: dict[str, Any], standing: Standing) -> None:
    assert stands(build, pod).standing is standing


def test_failures_say_what_failed(build: Any) -> None:
    assert stands(build, OOM).why == "container rollout ended with status 137 (OOMKilled)"
    refused = stands(build, {"phase": PodPhase.FAILED, "reason": "UnexpectedAdmissionError"})
    assert refused.why == "the kubelet refused it: UnexpectedAdmissionError"
    quick = stands(build, ENDED | {"age": 20.0}, memory=Memory())
    assert (quick.standing, quick.why) == (Standing.FAILED, "it ended with status 0 before it was of use")


@pytest.mark.parametrize(
    ("silent_s", "node_ready", "standing"),
    [
        (0, True, Standing.STARTING),
        (SILENT_S - 1, True, Standing.STARTING),
        (SILENT_S, True, Standing.FAILED),
        (LEASE_LOST_S - 1, False, Standing.STARTING),
        (LEASE_LOST_S, False, Standing.TAKEN),
        (SILENT_S, False, Standing.TAKEN),
    ],
)
def test_engine_that_the_manager_lost(build: Any, silent_s: float, node_ready: bool, standing: Standing) -> None:
    memory = Memory(registered=frozenset({UID}), silent_since={UID: build.now - silent_s}, began_at=0.0)
    nodes = build.nodes(build.pod(NAME), ready=node_ready)
    one = stands(build, {}, memory=memory, manager=build.manager([]), nodes=nodes)
    assert one.standing is standing


@pytest.mark.parametrize("manager", [None, {"missed": 3}, {"ago": 200.0}])
def test_silence_of_the_manager_proves_nothing_about_engines(build: Any, manager: dict[str, Any] | None) -> None:
    memory = Memory(registered=frozenset({UID}), silent_since={UID: 0.0}, began_at=0.0)
    heard = None if manager is None else build.manager([], **manager)
    assert stands(build, {}, memory=memory, manager=heard).standing is Standing.SERVING


@pytest.mark.parametrize(
    ("placed", "watched_s", "standing"),
    [
        (1799.0, 5000.0, Standing.STARTING),
        (1800.0, 5000.0, Standing.FAILED),
        (1800.0, SILENT_S - 1, Standing.STARTING),  # A new operator beside a new manager knows nobody yet.
        (1800.0, SILENT_S, Standing.FAILED),
    ],
)
def test_startup_timeout(build: Any, placed: float, watched_s: float, standing: Standing) -> None:
    memory = Memory(began_at=build.now - watched_s)
    one = stands(build, {"age": placed, "placed": placed}, memory=memory, manager=build.manager([]))
    assert one.standing is standing


def test_agent_that_hands_over_by_itself_was_told_by_its_machine(build: Any) -> None:
    draining = (replace(build.engine(NAME), state=EngineState.DRAINING),)
    status = ManagerStatus(seq=1, run_epoch=1, engines=draining)
    one = stands(build, {}, manager=ManagerFacts(status, build.now))
    assert one.standing is Standing.TAKEN
    assert one.notice.kind == "Unknown"
    over = replace(status, finished=True)
    assert stands(build, {}, manager=ManagerFacts(over, build.now)).standing is Standing.SERVING


def test_ends_after_the_goodbye_are_nobodys_loss(build: Any) -> None:
    assert stands(build, ENDED, manager=build.manager([], finished=True)).standing is Standing.RELEASED


def test_next_moment_is_the_earliest_of_theirs(build: Any) -> None:
    starting = build.pod("j-r-1", placed=100.0)
    left = build.pod("j-r-2", **ENDED, ended_at=build.now - 4)
    look = build.look(pods=(starting, left), manager=build.manager([]), memory=Memory(began_at=0.0))
    assert next_due(rollouts(look), look) == build.now + QUIET_S - 4
    look = build.look(pods=(starting,), manager=build.manager([]), memory=Memory(began_at=0.0))
    assert next_due(rollouts(look), look) == build.now + 1700
    unseen = build.pod("j-r-3")
    missed = Memory(absent_since={"n-j-r-3": build.now - 20})
    look = build.look(pods=(unseen,), nodes={}, manager=build.manager(["j-r-3"]), memory=missed)
    assert next_due(rollouts(look), look) == build.now + 40
