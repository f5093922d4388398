"""Where a job is in its life, and when it is deleted."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.cluster.lifecycle import LifecycleStage, active_s, delete_after_ttl, lifecycle
from polyrl.cluster.observation.facts import Exit, PodPhase
from polyrl.cluster.timestamps import millisecond, second
from polyrl.worker import Role


def flipped(build: Any, type_: str) -> dict[str, Any]:
    at = second(build.now - 50)
    known = {"type": type_, "status": "True", "reason": "R", "message": "m", "lastTransitionTime": at}
    return {"conditions": [known], "completionTime": at}


@pytest.mark.parametrize(
    ("spec", "trainer", "ended", "stage"),
    [
        pytest.param({}, {}, "", "RUNS", id="runs"),
        pytest.param({"suspend": True}, {}, "", "SUSPENDED", id="spec.suspend"),
        pytest.param({"suspend": True}, {"complete_at": 5.0}, "", "COMPLETE", id="complete wins over suspend"),
        pytest.param({}, {"failed_at": 5.0}, "", "FAILED", id="the trainer's Job failed"),
        pytest.param({}, {"failed_at": 5.0}, "Complete", "COMPLETE", id="an end is for ever"),
        pytest.param({"suspend": True}, {}, "Failed", "FAILED", id="so is a failure"),
    ],
)
def test_stage(build: Any, spec: dict[str, Any], trainer: dict[str, Any], ended: str, stage: str) -> None:
    status = flipped(build, ended) if ended else {}
    now = lifecycle(build.ctx(build.job(**spec), status, trainer=build.trainer(**trainer)))
    assert now.stage is LifecycleStage[stage]
    assert now.ended == (stage in ("COMPLETE", "FAILED"))


STUCK = {"type": "TrainerReady", "status": "False", "reason": "CannotGoOn", "message": "m"}


@pytest.mark.parametrize(
    ("suspend", "edited", "code", "stored", "stage"),
    [
        pytest.param(False, False, 78, False, "STUCK", id="it cannot go on"),
        pytest.param(False, False, None, True, "STUCK", id="its pod is gone"),
        pytest.param(False, True, 78, True, "RUNS", id="edited again"),
        pytest.param(True, False, 78, True, "SUSPENDED", id="suspended"),
        pytest.param(False, False, 2, False, "FAILED", id="its input was wrong from the beginning"),
    ],
)
def test_a_trainer_that_cannot_go_on_waits_for_an_edit(
    build: Any, suspend: bool, edited: bool, code: int | None, stored: bool, stage: str
) -> None:
    exits = () if code is None else (Exit("trainer", code, reason="Error"),)
    pods = () if code is None else (build.pod("j-trainer-0-a", Role.TRAINER, phase=PodPhase.FAILED, exits=exits),)
    status = {"conditions": [STUCK | {"lastTransitionTime": second(build.now)}] if stored else []}
    job = build.job(suspend=suspend)
    newest = build.ctx(job).hashes.templates[Role.TRAINER]
    failed = build.trainer(failed_at=5.0, template_hash="other" if edited else newest)
    assert lifecycle(build.ctx(job, status, pods=pods, trainer=failed)).stage is LifecycleStage[stage]


@pytest.mark.parametrize("seen", [True, False])
def test_a_failed_job_has_failed_once_the_end_of_its_pod_was_there_to_read(build: Any, seen: bool) -> None:
    """Jobs and pods come by watches of their own; what the trainer said of its end came later, and nobody looked."""
    pods = (build.pod("j-trainer-0-a", Role.TRAINER),) if seen else ()
    found = lifecycle(build.ctx(pods=pods, trainer=build.trainer(failed_at=build.now - 4)))
    assert (found.stage, found.due) == (LifecycleStage.RUNS, build.now + 6)
    late = lifecycle(build.ctx(pods=pods, trainer=build.trainer(failed_at=build.now - 10)))
    assert late.stage is LifecycleStage.FAILED, "its node does not answer"


@pytest.mark.parametrize(
    ("ran_s", "resumed", "due", "stage"),
    [
        pytest.param(10.0, True, 60.0, "RUNS", id="time is left"),
        pytest.param(70.0, True, None, "FAILED", id="used up"),
        pytest.param(10.0, False, None, "RUNS", id="of a suspended job time does not pass"),
        pytest.param(100.0, False, None, "FAILED", id="used up before it was suspended"),
    ],
)
def test_deadline(build: Any, ran_s: float, resumed: bool, due: float | None, stage: str) -> None:
    """30 s since it was resumed, after `ran_s` before that."""
    status = {"startTime": second(build.now - 999), "activeMillis": int(ran_s * 1000)}
    status |= {"lastResumeTime": millisecond(build.now - 30)} if resumed else {}
    ctx = build.ctx(build.job(activeDeadlineSeconds=100), status)
    now = lifecycle(ctx)
    assert (now.stage, now.due) == (LifecycleStage[stage], None if due is None else build.now + due)
    assert active_s(ctx) == ran_s + (30 if resumed else 0)
    if stage == "FAILED":
        assert now.failure is not None
        assert now.failure.reason == "DeadlineExceeded"


def test_failure_names_the_pod_that_failed_by_itself(build: Any) -> None:
    bad = {"phase": PodPhase.FAILED, "exits": (Exit("trainer", 1, reason="Error"),)}
    own = build.pod("j-trainer-0-a", Role.TRAINER, **bad)
    evicted = build.pod("j-trainer-0-b", Role.TRAINER, **bad, disruption="EvictionByEvictionAPI")
    failed = build.trainer(failed_at=5.0, failed_reason="PodFailurePolicy", failed_message="exit code 1")
    handed_over = {"phase": PodPhase.FAILED, "exits": (Exit("trainer", 143, reason="Error"),)}
    other = build.pod("j-trainer-1-c", Role.TRAINER, **handed_over)
    failure = lifecycle(build.ctx(trainer=failed, pods=(own, evicted, other))).failure
    assert failure is not None
    assert (failure.pod_name, failure.exit_code, failure.reason) == ("j-trainer-0-a", 1, "PodFailurePolicy")
    assert failure.message == "the trainer ended with status 1: exit code 1"


@pytest.mark.parametrize(
    ("ttl", "deleted", "due"),
    [(None, 0, None), (60, 0, 10.0), (50, 1, None)],
    ids=["kept for ever", "not yet", "its time has come"],
)
def test_ttl_after_the_end(build: Any, ttl: int | None, deleted: int, due: float | None) -> None:
    """The job ended 50 s ago."""
    spec = {} if ttl is None else {"ttlSecondsAfterFinished": ttl}
    ctx = build.ctx(build.job(**spec), flipped(build, "Complete"))
    actions, next_due = delete_after_ttl(ctx, lifecycle(ctx))
    assert (len(actions), next_due) == (deleted, None if due is None else build.now + due)
