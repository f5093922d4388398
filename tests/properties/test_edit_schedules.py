"""Edits, good and bad, trainers that cannot go on, late reads and a dying operator: no order of them ends a job."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import pytest

from polyrl.testing.fake_cluster import is_ended
from polyrl.testing.fake_operator import FakeOperator, Killed
from polyrl.testing.job_values import raw_job
from polyrl.worker import Role
from tests.unit.core.cluster.scenario import running

SCHEDULES: Final = 6
EVENTS: Final = 60
SETTLE_S: Final = 90.0
"""Longer than a trainer's grace and the next one's start."""
CANNOT_GO_ON: Final = "Container trainer for pod n/{} failed with exit code 78 matching FailJob rule at index 3"


class Edited:
    """A job that has ended steps, and what becomes of it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.scenario = rng, running(raw_job())
        for _ in range(2):
            self.scenario.step()
        self.cluster = self.scenario.cluster

    def edit(self, part: str, **more: Any) -> None:
        self.cluster.edit(**{part: self.cluster.objects["PolyRLJob", "j"]["spec"][part] | more})

    def live_trainers(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.cluster.pods(Role.TRAINER) if not is_ended(pod)]

    def cannot_go_on(self) -> None:
        """The trainer that runs says so; its pod may go with its node before anybody looks."""
        for name in self.live_trainers():
            if "deletionTimestamp" not in self.scenario.pod(name)["metadata"]:
                self.cluster.end_pod(name, 78)
                self.cluster.end_trainer("Failed", "PodFailurePolicy", CANNOT_GO_ON.format(name))
                if self.rng.random() < 0.5:
                    self.cluster.drop("Pod", name)

    def happen(self) -> None:
        events: list[Callable[[], None]] = [
            lambda: self.edit("recipe", seed=self.rng.choice([6, 7, 8])),
            lambda: self.edit("rollout", minReplicas=self.rng.choice([0, 0, 99])),
            lambda: self.cluster.edit(suspend=self.rng.random() < 0.4),
            self.cannot_go_on,
            self.restart,
            lambda: None,
        ]
        self.rng.choice(events)()
        self.cluster.pass_time(self.rng.choice([0.3, 1, 5, 20]))

    def restart(self) -> None:
        self.scenario.operator = FakeOperator(self.cluster)
        self.scenario.operator.catch_up()

    def turn(self) -> None:
        if self.rng.random() < 0.7:
            self.scenario.operator.catch_up(self.rng.choice([None, 1, 3, 10]))
        try:
            self.scenario.operator.turn(self.rng)
        except Killed:
            self.restart()


@pytest.mark.parametrize("number", range(SCHEDULES))
def test_no_order_of_edits_ends_a_job_or_makes_twins(seed: int, number: int) -> None:
    job = Edited(random.Random(f"{seed}/{number}"))
    for _ in range(EVENTS):
        job.happen()
        job.turn()
        assert len(job.live_trainers()) <= 1
        assert job.scenario.condition("Failed") is None
    job.edit("rollout", minReplicas=0)
    job.cluster.edit(suspend=True)
    job.scenario.go(SETTLE_S, every=3)
    assert job.scenario.reason("Suspended") == "Suspended"
    job.edit("recipe", seed=9)
    job.cluster.edit(suspend=False)
    job.scenario.go(SETTLE_S, every=3)
    assert (job.scenario.status.state, job.scenario.reason("Accepted")) == ("Running", "Valid")
