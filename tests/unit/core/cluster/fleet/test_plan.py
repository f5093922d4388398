"""What becomes of each rollout of a running job in one reconcile."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.cluster import names
from polyrl.cluster.actions import Action, Annotate, Create, Delete, DrainEngine
from polyrl.cluster.fleet.capacity_split import CapacitySplit
from polyrl.cluster.fleet.plan import MAX_CREATIONS, fleet_plan, limited
from polyrl.cluster.fleet.pools import pool_views
from polyrl.cluster.observation.disruption import DisruptionNotice
from polyrl.cluster.observation.facts import PodPhase
from polyrl.cluster.observation.rollouts import PodState, RolloutPod
from polyrl.cluster.state import ReconcileState
from polyrl.manifest.status import DisruptionKind

NOW = 1_000_000.0


@pytest.mark.parametrize(
    ("wanted", "made"),
    [
        pytest.param(
            CapacitySplit(spot=3, on_demand=2, standing_in=1),
            CapacitySplit(spot=3, on_demand=2, standing_in=1),
            id="little",
        ),
        pytest.param(CapacitySplit(spot=MAX_CREATIONS), CapacitySplit(spot=MAX_CREATIONS), id="as many as may be"),
        pytest.param(CapacitySplit(spot=MAX_CREATIONS + 1), CapacitySplit(spot=MAX_CREATIONS), id="one more"),
        pytest.param(
            CapacitySplit(spot=9, on_demand=MAX_CREATIONS - 4),
            CapacitySplit(spot=4, on_demand=MAX_CREATIONS - 4),
            id="base before spot",
        ),
        pytest.param(
            CapacitySplit(spot=9, on_demand=MAX_CREATIONS + 7, standing_in=9),
            CapacitySplit(on_demand=MAX_CREATIONS, standing_in=2),
            id="base before stand-ins before spot",
        ),
        pytest.param(
            CapacitySplit(spot=9, on_demand=MAX_CREATIONS + 7, standing_in=5),
            CapacitySplit(on_demand=MAX_CREATIONS),
            id="no stand-in has room",
        ),
        pytest.param(
            CapacitySplit(spot=MAX_CREATIONS * 2, excess=3, due=5.0),
            CapacitySplit(spot=MAX_CREATIONS, excess=3, due=5.0),
            id="nothing else changes",
        ),
    ],
)
def test_what_is_made_at_once(wanted: CapacitySplit, made: CapacitySplit) -> None:
    assert limited(wanted) == made


def mark(action: Action) -> str:
    """`+` a pod is made, `!` its engine drains, `#` it is numbered, `~` it is marked as released, `-` it is deleted."""
    match action:
        case Create(object):
            return f"+{object['metadata']['name'][-1]}"
        case DrainEngine(pod):
            return f"!{pod[-1]}"
        case Annotate(pod, _, annotations):
            return f"{'#' if names.ANNOTATION_COUNTED in annotations else '~'}{pod[-1]}"
        case Delete(_, pod):
            return f"-{pod[-1]}"
    raise AssertionError(action)


def notice(left_s: float, kind: DisruptionKind = DisruptionKind.SPOT) -> DisruptionNotice:
    return DisruptionNotice(kind, NOW - 30, deadline=NOW + left_s, confirmed=True, why="spot")


def preempted(build: Any, left_s: float = 20.0, kind: DisruptionKind = DisruptionKind.SPOT, **pod: Any) -> RolloutPod:
    one = build.rollout("j-r-2", **pod)
    return RolloutPod(one.pod, PodState.PREEMPTED, notice=notice(left_s, kind), engine=one.engine)


def numbered(number: int, counter: str = "preemption") -> dict[str, Any]:
    return {"annotations": {names.ANNOTATION_COUNTED: f"{counter}-{number}"}}


ENDED = {"phase": PodPhase.SUCCEEDED}


COUNTED = {"rollout": {"preemptions": 7, "failures": 3}}
"""Status in which these many losses are stored."""


def planned(build: Any, *fleet: RolloutPod, desired: int = 2, **ctx: Any) -> str:
    seen = build.ctx(pods=tuple(one.pod for one in fleet), **ctx)
    views = pool_views(seen, fleet, [], [])
    plan = fleet_plan(seen, fleet, desired=desired, views=views, boundary=False, missing=())
    return " ".join(map(mark, plan.actions))


@pytest.mark.parametrize(
    ("desired", "expected"),
    [
        pytest.param(1, "~2 !2 -2", id="one too many: released, drained, deleted"),
        pytest.param(2, "", id="as many as desired"),
        pytest.param(4, "+3 +4", id="too few"),
        pytest.param(0, "~2 ~1 !2 !1 -2 -1", id="actions of one kind side by side"),
    ],
)
def test_the_number(build: Any, desired: int, expected: str) -> None:
    fleet = [build.rollout("j-r-1"), build.rollout("j-r-2", age=50.0)]
    assert planned(build, *fleet, desired=desired) == expected


@pytest.mark.parametrize(
    ("left_s", "kind", "pod", "expected"),
    [
        pytest.param(20.0, DisruptionKind.SPOT, {}, "!2 #2 +3", id="new: drained, numbered, replaced at once"),
        pytest.param(20.0, DisruptionKind.SPOT, numbered(8), "!2 +3", id="its number is not stored yet: it stays"),
        pytest.param(20.0, DisruptionKind.SPOT, numbered(7), "!2 +3", id="counted, and has time left"),
        pytest.param(-9.9, DisruptionKind.SPOT, numbered(7), "!2 +3", id="its deadline has just passed"),
        pytest.param(-10.0, DisruptionKind.SPOT, numbered(7), "!2 +3 -2", id="it overstays"),
        pytest.param(20.0, DisruptionKind.LOST, numbered(7), "!2 +3 -2", id="its node is lost, and no time left"),
        pytest.param(20.0, DisruptionKind.SPOT, numbered(7) | ENDED, "+3 -2", id="it has ended, and drains no more"),
        pytest.param(-10.0, DisruptionKind.SPOT, numbered(7) | {"deletion_at": NOW}, "!2 +3", id="deleted already"),
    ],
)
def test_one_that_is_taken_away(
    build: Any, left_s: float, kind: DisruptionKind, pod: dict[str, Any], expected: str
) -> None:
    fleet = build.rollout("j-r-1"), preempted(build, left_s, kind, **pod)
    assert planned(build, *fleet, status=COUNTED) == expected


@pytest.mark.parametrize(
    ("state", "pod", "expected"),
    [
        pytest.param(PodState.FAILED, {}, "#2", id="a failure is numbered, and waits its back-off"),
        pytest.param(PodState.FAILED, numbered(3, "failure"), "+3 -2", id="a stored one makes room"),
        pytest.param(PodState.FAILED, numbered(4, "failure"), "+3", id="one that is not stored stays"),
        pytest.param(PodState.EXITED, {}, "", id="what just ended may be the end of the run"),
        pytest.param(PodState.DELETING, {}, "+3 -2", id="a released one whose deletion did not get through"),
        pytest.param(PodState.DELETING, {"deletion_at": NOW}, "+3", id="a released one that goes"),
    ],
)
def test_one_that_the_cluster_did_not_take(build: Any, state: PodState, pod: dict[str, Any], expected: str) -> None:
    fleet = build.rollout("j-r-1"), build.rollout("j-r-2", state, **pod)
    assert planned(build, *fleet, status=COUNTED) == expected


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        pytest.param(ReconcileState(), "!2 #2 +3", id="not confirmed: again"),
        pytest.param(ReconcileState(drains_confirmed=frozenset({"uid-j-r-2"})), "#2 +3", id="confirmed"),
    ],
)
def test_a_drain_is_repeated_until_it_is_confirmed(build: Any, state: ReconcileState, expected: str) -> None:
    assert planned(build, build.rollout("j-r-1"), preempted(build), state=state) == expected
