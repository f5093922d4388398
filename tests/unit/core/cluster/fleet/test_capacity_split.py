"""How many of each pool: tables of fleets, and a property of what may be made."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from polyrl.cluster.fleet.capacity_split import CapacitySplit, capacity_split
from polyrl.cluster.fleet.pools import UNLIMITED, PoolView
from polyrl.cluster.observation.facts import PodFacts, PodPhase
from polyrl.cluster.observation.rollouts import PodState, RolloutPod
from polyrl.cluster.timestamps import millisecond
from polyrl.manifest.rollout import RolloutSpec
from polyrl.manifest.status import PoolStatus
from polyrl.sample import Pool
from polyrl.worker import Role

NOW = 1_000_000.0
FALLBACK = {"policy": "SpotPreferred", "fallback": {"enabled": True, "afterSeconds": 300}}
STANDINGS = {"w": PodState.PENDING, "s": PodState.STARTING, "v": PodState.SERVING, "f": PodState.FAILED}


def fleet(spot: str, on_demand: str) -> list[RolloutPod]:
    """One letter per rollout: Waiting, Starting, serVing, Failed and not yet counted."""
    letters = [(Pool.SPOT, letter) for letter in spot] + [(Pool.ON_DEMAND, letter) for letter in on_demand]
    return [rollout(number, pool, STANDINGS[letter]) for number, (pool, letter) in enumerate(letters)]


def rollout(number: int, pool: Pool, state: PodState) -> RolloutPod:
    placed = None if state is PodState.PENDING else NOW - 50
    pod = PodFacts(
        f"r-{number}",
        f"u-{number}",
        role=Role.ROLLOUT,
        phase=PodPhase.RUNNING,
        created_at=NOW - 60,
        pool=pool,
        node="node",
        scheduled_at=placed,
    )
    return RolloutPod(pod, state)


def views(spot_room: int = UNLIMITED, limited_s: float | None = None, on_demand: int = UNLIMITED) -> list[PoolView]:
    since = None if limited_s is None else millisecond(NOW - limited_s)
    return [
        PoolView(PoolStatus.model_validate({"name": "spot", "limitedSince": since}), spot_room),
        PoolView(PoolStatus.model_validate({"name": "on-demand"}), on_demand),
    ]


def split(
    spot: str, on_demand: str, desired: int, capacity: dict[str, Any], seen: list[PoolView], most: int = 6
) -> CapacitySplit:
    spec = RolloutSpec.model_validate({"maxReplicas": most, "capacity": capacity})
    return capacity_split(fleet(spot, on_demand), desired, spec, seen, NOW)


@pytest.mark.parametrize(
    ("spot", "on_demand", "desired", "capacity", "expected"),
    [
        pytest.param("", "", 3, {"policy": "Spot"}, (3, 0, 0, 0), id="all spot"),
        pytest.param("", "", 3, {"policy": "OnDemand"}, (0, 3, 0, 0), id="all on-demand"),
        pytest.param("", "", 3, {"policy": "Spot", "baseOnDemand": 1}, (2, 1, 0, 0), id="a base on-demand"),
        pytest.param(
            "vv", "", 3, {"policy": "Spot", "baseOnDemand": 1}, (0, 1, 0, 0), id="spot serves, the base is missing"
        ),
        pytest.param("v", "v", 3, {"policy": "Spot", "baseOnDemand": 1}, (1, 0, 0, 0), id="one spot is missing"),
        pytest.param("vvv", "", 3, {"policy": "Spot"}, (0, 0, 0, 0), id="as many as desired"),
        pytest.param("vvvv", "", 3, {"policy": "Spot"}, (0, 0, 0, 1), id="one too many"),
        pytest.param("vvwf", "", 4, {"policy": "Spot"}, (0, 0, 0, 0), id="a failure is counted before it is replaced"),
        pytest.param("vvv", "", 0, {"policy": "Spot"}, (0, 0, 0, 3), id="none are desired"),
        pytest.param(
            "",
            "vvv",
            3,
            {"policy": "Spot"},
            (1, 0, 0, 0),
            id="policy changed: one by one",
        ),
    ],
)
def test_without_fallback(spot: str, on_demand: str, desired: int, capacity: Any, expected: tuple[int, ...]) -> None:
    got = split(spot, on_demand, desired, capacity, views())
    assert (got.spot, got.on_demand, got.stand_ins_to_release, got.excess) == expected


@pytest.mark.parametrize(
    ("spot", "on_demand", "limited_s", "expected"),
    [
        pytest.param("vw", "", 100.0, (0, 0, 0, 0), id="room 1 for spot is taken by the probe; not yet time"),
        pytest.param("vw", "", 300.0, (0, 2, 0, 0), id="3 desired: two stand in, the probe waits beside"),
        pytest.param("vwww", "", 300.0, (0, 2, 0, 0), id="one that waits in vain has no place"),
        pytest.param("vw", "vv", 900.0, (0, 0, 0, 0), id="they are there already"),
        pytest.param("vs", "vv", None, (0, 0, 0, 0), id="the probe got a node: it starts, stand-ins stay"),
        pytest.param("vv", "vv", None, (0, 0, 1, 0), id="it serves: a stand-in goes"),
        pytest.param("vv", "v", None, (1, 0, 0, 0), id="and the next spot pod is asked for"),
        pytest.param("vvw", "v", None, (0, 0, 0, 0), id="it is on its way"),
        pytest.param("vvv", "v", None, (0, 0, 1, 0), id="all serve: the last one leaves"),
        pytest.param("", "vvv", 900.0, (1, 0, 0, 0), id="the probe was taken: another"),
    ],
)
def test_stand_ins(spot: str, on_demand: str, limited_s: float | None, expected: tuple[int, ...]) -> None:
    room = 0 if "w" in spot else 1
    got = split(spot, on_demand, 3, FALLBACK, views(room, limited_s))
    assert (got.spot, got.on_demand, got.stand_ins_to_release, got.excess) == expected


def test_stand_ins_have_their_own_limit_and_time() -> None:
    limited = FALLBACK | {"fallback": {"enabled": True, "afterSeconds": 300, "maxReplicas": 1}}
    assert split("vw", "", 3, limited, views(0, 400.0)).on_demand == 1
    assert split("vw", "", 3, FALLBACK, views(0, 100.0)).due == pytest.approx(NOW + 200)


def test_no_more_nodes_than_max_even_while_spot_returns() -> None:
    """Three desired, three at most: the probe that got a node costs a stand-in its place."""
    got = split("vs", "vv", 3, FALLBACK, views(), most=3)
    assert (got.stand_ins_to_release, got.spot, got.on_demand) == (1, 0, 0)


@given(
    spot=st.text("wsvf", max_size=6),
    on_demand=st.text("wsvf", max_size=6),
    desired=st.integers(0, 6),
    base=st.integers(0, 6),
    policy=st.sampled_from(["Spot", "SpotPreferred", "OnDemand"]),
    rooms=st.tuples(*[st.sampled_from([0, 1, UNLIMITED])] * 2),
    limited_s=st.sampled_from([None, 10.0, 1000.0]),
)
@example(spot="fffww", on_demand="", desired=4, base=0, policy="SpotPreferred", rooms=(0, 1), limited_s=1000.0)
def test_never_makes_more_than_desired_and_one_probe(
    spot: str, on_demand: str, desired: int, base: int, policy: str, rooms: tuple[int, int], limited_s: float | None
) -> None:
    capacity = {"policy": policy, "baseOnDemand": base if policy != "OnDemand" else 0}
    capacity["fallback"] = {"enabled": policy == "SpotPreferred"}
    got = split(spot, on_demand, desired, capacity, views(rooms[0], limited_s, rooms[1]))
    there = len(spot) + len(on_demand)
    assert min(got.spot, got.on_demand, got.stand_ins_to_release, got.excess) >= 0
    assert got.spot <= rooms[0]
    assert got.on_demand <= rooms[1]
    if got.spot or got.on_demand:
        assert there - got.spot_to_release + got.spot + got.on_demand <= desired + 1
        assert got.excess == 0
    assert there - got.excess - got.stand_ins_to_release >= min(there, desired) - (1 if got.stand_ins_to_release else 0)


@pytest.mark.parametrize(("budget_pays", "stand_ins"), [(6, 3), (2, 2), (0, 0)], ids=["all", "two", "none"])
def test_stand_ins_are_no_more_than_the_budget_pays_for(budget_pays: int, stand_ins: int) -> None:
    capacity = {"policy": "SpotPreferred", "fallback": {"enabled": True, "afterSeconds": 60}}
    spec = RolloutSpec.model_validate({"maxReplicas": 6, "capacity": capacity})
    made = capacity_split([], 3, spec, views(spot_room=1, limited_s=100), NOW, budget_pays)
    assert made.on_demand == made.standing_in == stand_ins
