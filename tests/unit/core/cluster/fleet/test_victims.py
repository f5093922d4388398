"""Who goes first: each row says which of two is the cheaper loss."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.cluster.fleet.plan import victims
from polyrl.cluster.observation.disruption import DisruptionNotice
from polyrl.cluster.observation.rollouts import PodState
from polyrl.manifest.status import DisruptionKind
from polyrl.sample import Pool

AT_RISK = DisruptionNotice(DisruptionKind.DRAIN, 0.0, deadline=0.0, confirmed=False, why="cordoned")
SERVING: dict[str, Any] = {}
ORDER: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("no node before at risk", {"state": PodState.PENDING}, {"notice": AT_RISK}),
    ("at risk before starting", {"notice": AT_RISK}, {"state": PodState.STARTING}),
    ("starting before a stand-in", {"state": PodState.STARTING}, {"pool": Pool.ON_DEMAND}),
    ("stand-in before spot", {"pool": Pool.ON_DEMAND, "running": 9}, SERVING),
    ("old weights first", {"version": 0, "running": 9}, SERVING),
    ("least remaining work", {"running": 1}, {"running": 5}),
    ("alone on its node", {"node": "alone", "age": 200.0}, {"node": "shared"}),
    ("younger", {"age": 50.0}, {"age": 100.0}),
]


@pytest.mark.parametrize(("cheaper", "dearer"), [row[1:] for row in ORDER], ids=[row[0] for row in ORDER])
def test_order(build: Any, cheaper: dict[str, Any], dearer: dict[str, Any]) -> None:
    fleet = [
        build.rollout("j-r-1", **dearer),
        build.rollout("j-r-2", **cheaper),
        build.rollout("j-r-3", running=7, node="shared"),
    ]
    chosen = victims(fleet, 3, 0)
    assert [one.pod.name for one in chosen].index("j-r-2") < [one.pod.name for one in chosen].index("j-r-1")


def test_base_stays_to_the_last(build: Any) -> None:
    fleet = [
        build.rollout("j-r-1", pool=Pool.ON_DEMAND, running=0, age=500.0),
        build.rollout("j-r-2", pool=Pool.ON_DEMAND, running=9),
        build.rollout("j-r-3", running=5),
    ]
    assert [one.pod.name for one in victims(fleet, 3, 1)] == ["j-r-2", "j-r-3", "j-r-1"]


def test_only_live_ones_and_no_more_than_asked(build: Any) -> None:
    fleet = [
        build.rollout("j-r-1", PodState.PREEMPTED),
        build.rollout("j-r-2", PodState.DELETING),
        build.rollout("j-r-3"),
    ]
    assert [one.pod.name for one in victims(fleet, 5, 0)] == ["j-r-3"]
    assert victims(fleet, 0, 0) == []
