"""Where a job is in its life: running, suspended, complete or failed.

the trainer's Job is Complete / Failed    -> Complete / Failed
ran longer than activeDeadlineSeconds     -> Failed; time suspended is not counted
spec.suspend                              -> Suspended
the trainer cannot go on with what was edited -> Stuck, until it is edited again, or suspended and resumed
ttlSecondsAfterFinished after the end     -> the PolyRLJob itself is deleted
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from polyrl.cluster.actions import Delete
from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.facts import PodFacts, PodPhase, TrainerFacts
from polyrl.cluster.reasons import AcceptedReason, FailureReason
from polyrl.cluster.timestamps import unix
from polyrl.manifest.job import KIND
from polyrl.manifest.status import Failure
from polyrl.worker import CANNOT_GO_ON_EXIT, HANDED_OVER_EXIT, Role

END_MESSAGE_LENGTH: Final = 1024
"""Characters of the trainer's last words that are kept."""

END_UNSEEN_S: Final = 10.0
"""How long the end of a failed Job's pod may be unseen, for they are seen apart: it says what the failure means."""


_CANNOT_GO_ON: Final = re.compile(rf"Container {Role.TRAINER.value} for pod .* exit code {CANNOT_GO_ON_EXIT} ")
"""The Job controller's words for a rule of `podFailurePolicy`."""


class LifecycleStage(Enum):
    """The last two are for ever."""

    RUNS = auto()
    """It is to run, or runs."""
    SUSPENDED = auto()
    """`spec.suspend` is set: its pods are to be gone until it no longer is."""
    STUCK = auto()
    """Its trainer cannot go on from what is saved with the job as it is written: pods are to be gone until it can."""
    COMPLETE = auto()
    """The trainer ended with success."""
    FAILED = auto()
    """The trainer's Job failed, or the job's deadline passed."""


@dataclass(frozen=True)
class Lifecycle:
    """The stage, and when time alone may change it."""

    stage: LifecycleStage
    ended_at: float | None = None
    failure: Failure | None = None
    due: float | None = None

    @property
    def ended(self) -> bool:
        return self.stage in (LifecycleStage.COMPLETE, LifecycleStage.FAILED)


def lifecycle(ctx: ReconcileContext) -> Lifecycle:
    """Where the job is in its life now."""
    reported = {known.type for known in ctx.status.conditions if known.status == "True"}
    ended_at = unix(ctx.status.completion_time) or ctx.now
    if "Complete" in reported:
        return Lifecycle(LifecycleStage.COMPLETE, ended_at)
    if "Failed" in reported:
        return Lifecycle(LifecycleStage.FAILED, ended_at, failure=ctx.status.failure)
    trainer = ctx.facts.trainer
    if trainer is not None and trainer.complete_at is not None:
        return Lifecycle(LifecycleStage.COMPLETE, trainer.complete_at)
    if trainer is not None and trainer.failed_at is not None and not cannot_go_on(ctx, trainer):
        ended = [pod.ended for pod in ctx.facts.of_role(Role.TRAINER)]
        if not (ended and all(ended)) and ctx.now < trainer.failed_at + END_UNSEEN_S:
            return Lifecycle(LifecycleStage.RUNS, due=trainer.failed_at + END_UNSEEN_S)
        return Lifecycle(LifecycleStage.FAILED, trainer.failed_at, failure=_failure(ctx, trainer))
    due = _deadline(ctx)
    if due is not None and ctx.now >= due:
        limit = ctx.spec.active_deadline_seconds
        message = f"the job ran longer than its activeDeadlineSeconds ({limit})"
        return Lifecycle(
            LifecycleStage.FAILED, ctx.now, failure=Failure(reason=FailureReason.DEADLINE_EXCEEDED, message=message)
        )
    if ctx.spec.suspend:
        return Lifecycle(LifecycleStage.SUSPENDED)
    if trainer is not None and trainer.failed_at is not None and not is_edited(ctx, trainer):
        return Lifecycle(LifecycleStage.STUCK)
    return Lifecycle(LifecycleStage.RUNS, due=due)


def cannot_go_on(ctx: ReconcileContext, trainer: TrainerFacts) -> bool:
    """The trainer's Job failed since the trainer does not go on from what is saved: it said so, or ended no step of a
    job that had ended some before it was edited. Pods may be gone, with their nodes: then the Job's words say what it
    said, or TrainerReady, which no wrong edit changes."""
    before, pod, stepped_at = ctx.status.condition("TrainerReady"), _culprit(ctx), unix(ctx.status.manager.step_time)
    known = before is not None and before.reason == AcceptedReason.CANNOT_GO_ON
    ended_none = ctx.status.manager.step > 0 and stepped_at is not None and stepped_at < trainer.created_at
    in_words = _CANNOT_GO_ON.match(trainer.failed_message) is not None
    ends = {(end.container, end.code) for end in (() if pod is None else pod.exits)}
    return known or ended_none or in_words or (Role.TRAINER, CANNOT_GO_ON_EXIT) in ends


def is_edited(ctx: ReconcileContext, trainer: TrainerFacts) -> bool:
    """The trainer's Job is not what the job, as it is written now, asks for."""
    return trainer.template_hash != ctx.hashes.templates[Role.TRAINER]


def active_s(ctx: ReconcileContext) -> float:
    """Seconds that the job has run, time suspended left out."""
    resumed_at = unix(ctx.status.last_resume_time)
    return ctx.status.active_millis / 1000 + (0.0 if resumed_at is None else max(0.0, ctx.now - resumed_at))


def delete_after_ttl(ctx: ReconcileContext, now: Lifecycle) -> tuple[list[Delete], float | None]:
    """The deletion of the finished job itself when it is due, or when it will be."""
    ttl = ctx.spec.ttl_seconds_after_finished
    if ttl is None or now.ended_at is None:
        return [], None
    due = now.ended_at + ttl
    if ctx.now < due:
        return [], due
    return [Delete(KIND, ctx.facts.name, uid=ctx.facts.uid, why=f"it ended more than {ttl} s ago")], None


def _deadline(ctx: ReconcileContext) -> float | None:
    """When the running time is used up, if it goes on; of a suspended job only whether it is."""
    limit = ctx.spec.active_deadline_seconds
    if limit is None or ctx.status.start_time is None:
        return None
    left = limit - active_s(ctx)
    return ctx.now + left if left <= 0 or ctx.status.last_resume_time is not None else None


def _failure(ctx: ReconcileContext, trainer: TrainerFacts) -> Failure:
    pod = _culprit(ctx)
    code = next((end.code for end in pod.exits if end.code != 0), None) if pod is not None else None
    message = trainer.failed_message or "the trainer's Job failed"
    return Failure(
        reason=trainer.failed_reason or FailureReason.TRAINER_FAILED,
        message=(message if code is None else f"the trainer ended with status {code}: {message}")[:END_MESSAGE_LENGTH],
        exit_code=code if code is None or 0 <= code <= 255 else None,
        pod_name=pod.name if pod is not None else "",
    )


def _culprit(ctx: ReconcileContext) -> PodFacts | None:
    """The newest trainer pod that failed by itself; the others of a group handed over because it did."""
    failed = [pod for pod in ctx.facts.of_role(Role.TRAINER) if pod.phase is PodPhase.FAILED]
    own = (pod for pod in reversed(failed) if not pod.disruption and not _handed_over(pod))
    return next(own, failed[-1] if failed else None)


def _handed_over(pod: PodFacts) -> bool:
    return any(end.code == HANDED_OVER_EXIT for end in pod.exits)
