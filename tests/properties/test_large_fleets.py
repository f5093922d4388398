"""Fleets too large for one look: what is made and let go at once is bounded, so that a notice is never held up."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.cluster.actions import Create, Delete, DrainEngine, ReconcileResult
from polyrl.cluster.fleet.plan import CONTINUE_AFTER_S, MAX_CREATIONS, MAX_RELEASES
from polyrl.testing.fake_cluster import FakeCluster
from polyrl.testing.fake_operator import FakeOperator
from polyrl.testing.job_values import raw_job
from polyrl.worker import Role

FLEET = 3 * MAX_CREATIONS
RECONCILES = 3


class Large:
    """A running job whose fleet is to be `FLEET`, and an operator that sees all at once."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.cluster = FakeCluster(job)
        self.operator = FakeOperator(self.cluster)
        for _ in range(10):
            self.ctx()
            self.cluster.pass_time(1)

    def ctx(self) -> ReconcileResult:
        self.operator.catch_up()
        return self.operator.turn()

    def scale(self, replicas: int) -> None:
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


def test_a_notice_amid_many_creations_is_reported_in_the_next_reconcile(large: Large) -> None:
    (serving,) = large.rollouts()
    large.scale(FLEET + 1)
    sizes = []
    for number in range(RECONCILES):
        decision = large.ctx()
        sizes.append(sum(isinstance(action, Create) for action in decision.actions))
        if number == 1:
            large.cluster.delete("Pod", serving, large.cluster.objects["Pod", serving]["metadata"]["uid"])
        if number == 2:
            first = next(action for action in decision.actions if isinstance(action, Create | DrainEngine))
            assert isinstance(first, DrainEngine)
            assert first.pod == serving
        if number < RECONCILES - 1:
            assert decision.wake_at is not None
            assert decision.wake_at <= large.operator.now + CONTINUE_AFTER_S
    assert max(sizes) == MAX_CREATIONS
    large.ctx()
    assert len(large.rollouts() - {serving}) == FLEET + 1
    assert not [action for action in large.ctx().actions if isinstance(action, Create)]


def test_many_are_released_in_several_reconciles_and_each_once(large: Large) -> None:
    large.scale(FLEET)
    for _ in range(2 * RECONCILES):
        large.ctx()
        large.cluster.pass_time(1)
    large.cluster.pass_time(10)
    large.ctx()
    assert len(large.rollouts()) == FLEET
    large.scale(0)
    gone: list[str] = []
    for _ in range(FLEET // MAX_RELEASES):
        now = [action.name for action in large.ctx().actions if isinstance(action, Delete)]
        assert len(now) == MAX_RELEASES
        gone += now
    assert len(set(gone)) == len(gone) == FLEET
    assert not large.rollouts()
    assert large.operator.status is not None
    assert large.operator.status["rollout"]["preemptions"] == 0
