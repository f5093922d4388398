"""The status of a large or unlucky job: small, whole, and written only when something changed."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.cluster import names
from polyrl.cluster.observation.facts import Exit, PodPhase
from polyrl.cluster.reconcile import reconcile
from polyrl.cluster.state import ReconcileState
from polyrl.manifest.status import JobStatus
from polyrl.testing.fake_operator import SETTINGS
from polyrl.worker import Role

BYTES = 16 * 1024
LONG = "0/900 nodes are available: insufficient nvidia.com/gpu. " * 40


def stored(status: JobStatus) -> dict[str, Any]:
    plain: dict[str, Any] = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return plain


def test_thousand_pods_in_every_state(build: Any) -> None:
    names_of = [f"j-r-{number}" for number in range(1000)]
    pods = [
        build.pod(name, placed=None, age=3000.0, unschedulable=LONG)
        if number % 4 == 0
        else build.pod(name, phase=PodPhase.FAILED, exits=(Exit("rollout", 137, reason="OOMKilled"),))
        if number % 4 == 1
        else build.pod(name, annotations={names.ANNOTATION_COUNTED: f"preemption-{number}"}, disruption="x")
        if number % 4 == 2
        else build.pod(name)
        for number, name in enumerate(names_of)
    ]
    job = build.job({"maxReplicas": 1024, "replicas": 1000})
    facts = build.facts(job, {}, pods=tuple(pods), manager=build.manager(names_of[3::4]), dry_run=LONG * 10)
    decision = reconcile(facts, SETTINGS, ReconcileState(), build.now)
    assert len(decision.status.model_dump_json(by_alias=True, exclude_none=True)) < BYTES
    assert decision.status.rollout.replicas == 500
    assert len(decision.status.recent_disruptions) == 10


@pytest.mark.parametrize("later", [0.0, 5.0, 59.0])
def test_time_alone_changes_nothing(build: Any, later: float) -> None:
    pods = [build.pod(f"j-r-{number}", age=90.0, placed=90.0) for number in range(3)]
    pods += [build.pod("j-manager-1", Role.MANAGER, ready=True), build.pod("j-trainer-0-x", Role.TRAINER, ready=True)]
    job = build.job(pricing={"spotPerHour": 1.0})
    state, status = ReconcileState(), JobStatus()
    for at in (build.now, build.now, build.now + later):
        facts = build.facts(
            job,
            stored(status),
            pods=tuple(pods),
            trainer=build.trainer(),
            manager=build.manager([f"j-r-{number}" for number in range(3)], ago=build.now - at),
            dry_run="",
        )
        before, decision = status, reconcile(facts, SETTINGS, state, at)
        state, status = decision.state, decision.status
    assert status == before


def test_what_is_stored_is_read_back_as_written(build: Any) -> None:
    facts = build.facts(status={}, pods=(build.pod(disruption="x"),), manager=build.manager(["j-r-1"]), dry_run="")
    status = reconcile(facts, SETTINGS, ReconcileState(), build.now).status
    assert JobStatus.model_validate(stored(status)) == status
