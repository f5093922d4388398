"""Whether a job is taken on, and what the API server is asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polyrl.cluster.acceptance import DRY_RUN_RETRY_S, acceptance
from polyrl.cluster.state import ReconcileState

QUOTA = "pods is forbidden: exceeded quota: gpus"
OWN_COMMAND = {"rollout": {"template": {"spec": {"containers": [{"name": "rollout", "command": ["sh"]}]}}}}
REFUSED = "Pod j-r-0: violates PodSecurity"
AWAY = 'Pod j-r-0: Internal error occurred: failed calling webhook "pods.example.org": connection refused'


@pytest.mark.parametrize(
    ("spec", "dry_run", "expected"),
    [
        pytest.param(OWN_COMMAND, "", (False, "Unsupported", False, False), id="unsupported"),
        pytest.param({}, None, (None, "Checking", False, True), id="not asked yet"),
        pytest.param({}, "", (True, "Valid", True, False), id="the API server agrees"),
        pytest.param({}, QUOTA, (True, "Valid", True, False), id="a used up quota is no fault of the template"),
        pytest.param({}, REFUSED, (False, "InvalidPodTemplate", False, False), id="refused"),
        pytest.param({}, AWAY, (None, "Checking", False, False), id="a webhook that does not answer is no verdict"),
    ],
)
def test_verdict(build: Any, spec: dict[str, Any], dry_run: str | None, expected: tuple[Any, ...]) -> None:
    found = acceptance(build.ctx(build.job(**spec), dry_run=dry_run, state=ReconcileState(dry_run_at=build.now)))
    assert (found.verdict, found.reason, found.makes_pods, found.dry_run is not None) == expected
    assert dry_run in (None, "") or dry_run in found.message


@pytest.mark.parametrize("answer", [REFUSED, AWAY], ids=["refused", "not answered"])
@pytest.mark.parametrize(
    ("ago", "again"),
    [
        pytest.param(DRY_RUN_RETRY_S - 1, False, id="too early"),
        pytest.param(DRY_RUN_RETRY_S, True, id="a minute later"),
    ],
)
def test_a_job_that_was_not_taken_is_tried_again(build: Any, answer: str, ago: float, again: bool) -> None:
    found = acceptance(build.ctx(dry_run=answer, state=ReconcileState(dry_run_at=build.now - ago)))
    assert found.verdict is (False if answer == REFUSED else None)
    assert (found.dry_run is not None) == again
    assert found.due == build.now + (DRY_RUN_RETRY_S if again else 1)


def test_what_is_left_out_is_said(build: Any) -> None:
    ctx = build.ctx(dry_run="")
    newer = replace(ctx, facts=replace(ctx.facts, unknown=("spec.later", "spec.rollout.colour")))
    assert acceptance(newer).message.endswith("leaves them out: spec.later, spec.rollout.colour")


def test_what_was_accepted_is_not_asked_again(build: Any) -> None:
    known = {"type": "Accepted", "status": "True", "reason": "Valid", "message": "m", "observedGeneration": 1}
    known["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    found = acceptance(build.ctx(status={"conditions": [known]}))
    assert (found.verdict, found.dry_run) == (True, None)
    assert found.state is not None
    assert acceptance(build.ctx(state=found.state)).verdict


@pytest.mark.parametrize(
    ("trainer", "reason"),
    [
        pytest.param({"template_hash": "old"}, "ImmutableFieldChanged", id="it runs on as it began"),
        pytest.param({"template_hash": "old", "suspended": True}, "Checking", id="suspended: may be changed"),
        pytest.param({"template_hash": "old", "complete_at": 1.0}, "Checking", id="complete"),
    ],
)
def test_a_running_trainer_cannot_be_changed(build: Any, trainer: dict[str, Any], reason: str) -> None:
    assert acceptance(build.ctx(trainer=build.trainer(**trainer))).reason == reason


def test_a_pod_of_each_kind_is_tried(build: Any) -> None:
    found = acceptance(build.ctx(build.job({"capacity": {"baseOnDemand": 1}})))
    assert found.dry_run is not None
    assert [one["metadata"]["name"] for one in found.dry_run.objects] == [
        "j-trainer", "j-trainer", "j-manager-0", "j-r-0", "j-r-0",
    ]  # fmt: skip
