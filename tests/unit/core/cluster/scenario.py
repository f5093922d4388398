"""One job on the fake cluster, turn by turn, with what a user would see of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from polyrl.cluster.actions import (
    Action,
    ReconcileResult,
)
from polyrl.manifest.status import Condition, JobStatus
from polyrl.testing.fake_cluster import FakeCluster
from polyrl.testing.fake_operator import FakeOperator
from polyrl.worker import Role


class Scenario:
    """A job, its cluster, and an operator that sees all at once."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.cluster = FakeCluster(job)
        self.operator = FakeOperator(self.cluster)

    def turn(self) -> ReconcileResult:
        self.operator.catch_up()
        return self.operator.turn()

    def go(self, seconds: float, every: float = 1.0) -> list[Action]:
        """Lets time pass with a turn after each second; returns what was done."""
        done = len(self.operator.done)
        end = self.cluster.now + seconds
        self.turn()
        while self.cluster.now < end:
            self.cluster.pass_time(every)
            self.turn()
        return self.operator.done[done:]

    @property
    def status(self) -> JobStatus:
        return JobStatus.model_validate(self.cluster.objects["PolyRLJob", "j"]["status"])

    def condition(self, kind: str) -> Condition | None:
        return next((one for one in self.status.conditions if one.type == kind), None)

    def reason(self, kind: str) -> str:
        found = self.condition(kind)
        return "" if found is None else found.reason

    def names(self, role: Role = Role.ROLLOUT) -> list[str]:
        return sorted(pod["metadata"]["name"] for pod in self.cluster.pods(role))

    def pod(self, name: str) -> Any:
        return self.cluster.objects["Pod", name]

    def message(self) -> Counter[str]:
        return Counter(event.reason for event in self.operator.message)

    def delete(self, name: str, grace_s: int | None = None) -> None:
        self.cluster.delete("Pod", name, self.pod(name)["metadata"]["uid"], grace_s)

    def step(self, rollout_s: float = 20.0) -> None:
        self.operator.end_step(rollout_s, train_s=20.0)
        self.turn()


def running(job: dict[str, Any], seconds: float = 20) -> Scenario:
    scenario = Scenario(job)
    scenario.go(seconds)
    return scenario


def of(actions: list[Action], kind: type[Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]
