"""Fleets too large for one look: what is made and let go at once is bounded, so that a notice is never held up."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.cluster.actions import Create, Decision, Delete, Drain
from polyrl.cluster.fleet.capacity_split import Mix
from polyrl.cluster.fleet.plan import AT_ONCE, GO_AT_ONCE, REST_S, at_once
from polyrl.testing.fake_cluster import FakeCluster
from polyrl.testing.fake_operator import FakeOperator
from polyrl.testing.job_values import raw_job
from polyrl.worker import Role

FLEET = 3 * AT_ONCE
LOOKS = 3


@pytest.mark.parametrize(
    ("wanted", "made"),
    [
        (Mix(spot=3, on_demand=2, standing_in=1), Mix(spot=3, on_demand=2, standing_in=1)),
        (Mix(spot=AT_ONCE), Mix(spot=AT_ONCE)),
        (Mix(spot=AT_ONCE + 1), Mix(spot=AT_ONCE)),
        (Mix(spot=9, on_demand=AT_ONCE - 4), Mix(spot=4, on_demand=AT_ONCE - 4)),
        (Mix(spot=9, on_demand=AT_ONCE + 7, standing_in=9), Mix(on_demand=AT_ONCE, standing_in=2)),
        (Mix(spot=9, on_demand=AT_ONCE + 7, standing_in=5), Mix(on_demand=AT_ONCE)),
        (Mix(spot=AT_ONCE * 2, excess=3, due=5.0), Mix(spot=AT_ONCE, excess=3, due=5.0)),
    ],
)
def test_what_is_made_at_once(wanted: Mix, made: Mix) -> None:
    assert at_once(wanted) == made


class Large:
    """A running job whose fleet is to be `FLEET`, and an operator that sees all at once."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.cluster = FakeCluster(job)
        self.operator = FakeOperator(self.cluster)
        for _ in range(10):
            self.look()
            self.cluster.pass_time(1)

    def look(self) -> Decision:
        self.operator.catch_up()
        return self.operator.turn()

    def wish(self, replicas: int) -> None:
        job = self.cluster.objects["PolyRLJob", "j"]
        metadata = job["metadata"] | {"generation": job["metadata"]["generation"] + 1}
        spec = job["spec"] | {"rollout": job["spec"]["rollout"] | {"replicas": replicas}}
        self.cluster.patch("PolyRLJob", "j", {"metadata": metadata, "spec": spec})

    def rollouts(self) -> set[str]:
        there = [pod["metadata"] for pod in self.cluster.pods(Role.ROLLOUT)]
        return {one["name"] for one in there if "deletionTimestamp" not in one}


@pytest.fixture
def large() -> Large:
    manual = {"mode": "Manual"}
    return Large(raw_job({"replicas": 1, "maxReplicas": FLEET + 1}, scaling=manual))


def test_a_notice_amid_many_creations_is_told_in_the_next_look(large: Large) -> None:
    (serving,) = large.rollouts()
    large.wish(FLEET + 1)
    sizes = []
    for number in range(LOOKS):
        decision = large.look()
        sizes.append(sum(isinstance(action, Create) for action in decision.actions))
        if number == 1:
            large.cluster.delete("Pod", serving, large.cluster.objects["Pod", serving]["metadata"]["uid"])
        if number == 2:
            first = next(action for action in decision.actions if isinstance(action, Create | Drain))
            assert isinstance(first, Drain)
            assert first.pod == serving
        if number < LOOKS - 1:
            assert decision.wake_at is not None
            assert decision.wake_at <= large.operator.now + REST_S
    assert max(sizes) == AT_ONCE
    large.look()
    assert len(large.rollouts() - {serving}) == FLEET + 1
    assert not [action for action in large.look().actions if isinstance(action, Create)]


def test_many_are_let_go_in_several_looks_and_each_once(large: Large) -> None:
    large.wish(FLEET)
    for _ in range(2 * LOOKS):
        large.look()
        large.cluster.pass_time(1)
    large.cluster.pass_time(10)
    large.look()
    assert len(large.rollouts()) == FLEET
    large.wish(0)
    gone: list[str] = []
    for _ in range(FLEET // GO_AT_ONCE):
        now = [action.name for action in large.look().actions if isinstance(action, Delete)]
        assert len(now) == GO_AT_ONCE
        gone += now
    assert len(set(gone)) == len(gone) == FLEET
    assert not large.rollouts()
    assert large.operator.status is not None
    assert large.operator.status["rollout"]["preemptions"] == 0
