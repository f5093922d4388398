"""A namespace's quota has room for less than the job asks for: its trainer comes first, also when it starts anew."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.cluster.fleet.singletons import lacks_pods
from polyrl.cluster.observation.facts import PodPhase
from polyrl.testing.job_values import raw_job
from polyrl.worker import Role
from tests.unit.core.cluster.scenario import Scenario

QUOTA = 4
"""Pods: a manager, a trainer, and two of three rollouts."""


def under_quota() -> Scenario:
    scenario = Scenario(raw_job())
    scenario.cluster.quota = QUOTA
    scenario.turn()
    return scenario


def test_rollouts_leave_room_for_the_trainer() -> None:
    """They took it all, and the trainer's Job could make no pod for as long as they lived, which was for ever."""
    scenario = under_quota()
    scenario.go(60)
    assert len(scenario.names(Role.TRAINER)) == 1
    assert len(scenario.names()) == 2
    assert (scenario.status.state, scenario.reason("CapacityLimited")) == ("Running", "QuotaExceeded")


def test_a_trainer_that_failed_keeps_its_room() -> None:
    """Its Job waits for up to six minutes before another start."""
    scenario = under_quota()
    scenario.go(60)
    (trainer,) = scenario.names(Role.TRAINER)
    scenario.cluster.end_pod(trainer, 137)
    scenario.cluster.pauses_trainer = True
    scenario.go(1200, every=20)
    assert len(scenario.names()) == 2, "rollouts that wait for room do not take it"
    scenario.cluster.pauses_trainer = False
    scenario.go(60)
    assert scenario.status.state == "Running"
    scenario.cluster.quota = None
    scenario.go(700, every=20)
    assert len(scenario.names()) == 3


def test_while_the_trainer_has_no_pod_that_is_said_and_no_rollout_is_made() -> None:
    scenario = Scenario(raw_job())
    scenario.cluster.quota = 1
    scenario.go(60)
    assert (scenario.names(Role.MANAGER), scenario.names()) == (["j-manager-1"], [])
    ready = scenario.condition("TrainerReady")
    assert ready is not None
    assert (ready.status, ready.reason) == ("False", "Starting")
    assert "kubectl describe job j-trainer" in ready.message
    assert "rollouts" in ready.message


def test_no_rollout_makes_way_for_a_template_that_cannot_follow_yet(scenario: Scenario) -> None:
    scenario.cluster.pauses_trainer = True
    scenario.cluster.end_pod(scenario.names(Role.TRAINER)[0], 137)
    fleet = scenario.cluster.objects["PolyRLJob", "j"]["spec"]["rollout"]
    template = {"spec": {"containers": [{"name": "rollout", "image": "another"}]}}
    scenario.cluster.edit(rollout=fleet | {"template": template})
    scenario.go(5)
    scenario.step()
    scenario.go(10)
    assert scenario.names() == ["j-r-1", "j-r-2", "j-r-3"]
    scenario.cluster.pauses_trainer = False
    scenario.go(10)
    scenario.step()
    scenario.go(10)
    assert "j-r-4" in scenario.names()


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        pytest.param([], True, id="none yet"),
        pytest.param([PodPhase.PENDING], True, id="one of two"),
        pytest.param([PodPhase.PENDING, PodPhase.RUNNING], False, id="both, though one has no node"),
        pytest.param([PodPhase.RUNNING, PodPhase.FAILED], True, id="one failed"),
        pytest.param([PodPhase.RUNNING, PodPhase.SUCCEEDED], False, id="one is done"),
    ],
)
def test_which_pods_are_still_to_be_made(build: Any, phases: list[PodPhase], expected: bool) -> None:
    pods = tuple(build.pod(f"j-trainer-{n}-x", Role.TRAINER, phase=phase) for n, phase in enumerate(phases))
    job = build.job(trainer={"replicas": 2, "storage": {"accessMode": "ReadWriteMany"}})
    assert lacks_pods(build.ctx(job, pods=pods)) == expected
