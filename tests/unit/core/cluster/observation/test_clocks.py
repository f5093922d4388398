"""The time that decisions are made by leaps, as when a control plane's clock is set: nobody is replaced, nothing is
counted, no wait becomes for ever. (That our own clock is wrong does not reach them; see the shell's `clock`.)"""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.cluster.actions import Action, Annotate, Create, Delete, DrainEngine
from polyrl.manifest.status import JobStatus
from polyrl.sample import Pool
from polyrl.testing.fake_cluster import FakeCluster
from polyrl.testing.fake_operator import FakeOperator
from polyrl.testing.job_values import raw_job
from polyrl.worker import Role

FAR_S = 300.0
FAR = pytest.mark.parametrize("ahead_s", [-FAR_S, FAR_S], ids=["behind", "ahead"])


class Scenario:
    """A job, its cluster, and an operator with a clock of its own."""

    def __init__(self, job: dict[str, Any], ahead_s: float = 0.0) -> None:
        self.cluster = FakeCluster(job)
        self.operator = FakeOperator(self.cluster, clock_ahead_s=ahead_s)

    def go(self, seconds: float, every: float = 1.0) -> list[Action]:
        """Lets time pass with a turn after each `every`; returns what was done."""
        done, end = len(self.operator.done), self.cluster.now + seconds
        while True:
            self.operator.catch_up()
            self.operator.turn()
            if self.cluster.now >= end:
                return self.operator.done[done:]
            self.cluster.pass_time(every)

    @property
    def status(self) -> JobStatus:
        return JobStatus.model_validate(self.cluster.objects["PolyRLJob", "j"]["status"])

    def lose(self, role: Role = Role.ROLLOUT) -> None:
        """All its pods are gone."""
        for pod in self.cluster.pods(role):
            self.cluster.delete("Pod", pod["metadata"]["name"], pod["metadata"]["uid"], 0)


def started(job: dict[str, Any], ahead_s: float = 0.0) -> Scenario:
    scenario = Scenario(job, ahead_s)
    scenario.go(20)
    assert scenario.status.rollout.registered_replicas == job["spec"]["rollout"]["replicas"]
    return scenario


def of(actions: list[Action], *kinds: type[Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kinds)]


@FAR
def test_by_a_wrong_clock_a_job_starts_and_is_left_alone(ahead_s: float) -> None:
    scenario = started(raw_job(), ahead_s)
    assert of(scenario.go(600, every=10), Create, Delete, Annotate, DrainEngine) == []
    assert scenario.status.state == "Running"


@FAR
def test_a_leap_changes_nothing(ahead_s: float) -> None:
    scenario = started(raw_job())
    scenario.operator.clock_ahead_s = ahead_s
    assert of(scenario.go(60), Create, Delete, Annotate, DrainEngine) == []
    scenario.operator.clock_ahead_s = 0.0
    assert of(scenario.go(60), Create, Delete, Annotate, DrainEngine) == []
    assert scenario.status.state == "Running"


@pytest.mark.slow
@FAR
def test_a_leap_while_a_pool_backs_off_ends_no_wait_late(ahead_s: float) -> None:
    scenario = started(raw_job({"pendingTimeoutSeconds": 60}))
    scenario.cluster.room[Pool.SPOT.value] = 0
    scenario.lose()
    scenario.go(200)
    assert scenario.status.rollout.pools[0].state == "BackingOff"
    scenario.operator.clock_ahead_s = ahead_s
    scenario.cluster.room[Pool.SPOT.value] = 100
    scenario.go(120)
    assert scenario.status.rollout.registered_replicas == 3


@pytest.mark.slow
@FAR
def test_time_that_leaps_is_not_running_time_for_ever(ahead_s: float) -> None:
    """A leap counts once, in its own direction; time never runs backwards in the job's account."""
    scenario = started(raw_job(activeDeadlineSeconds=1000))
    before = scenario.status.active_millis
    scenario.operator.clock_ahead_s = ahead_s
    scenario.cluster.edit(suspend=True)
    scenario.go(60)
    assert scenario.status.active_millis >= before
    scenario.cluster.edit(suspend=False)
    scenario.go(500, every=5)
    assert scenario.status.state == "Running"
    scenario.go(600, every=5)
    assert scenario.status.state == "Failed"
