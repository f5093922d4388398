"""Where a job is in its life: running, suspended, complete or failed; the last two are for ever.

    the trainer's Job is Complete / Failed    -> Complete / Failed
    ran longer than activeDeadlineSeconds     -> Failed; time suspended is not counted
    spec.suspend                              -> Suspended
    ttlSecondsAfterFinished after the end     -> the PolyRLJob itself is deleted

Refuses to hold: what each means for trainer, manager and rollouts (see `singles`, `fleet_plan`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from polyrl.cluster.actions import Delete
from polyrl.cluster.observation.context import Look
from polyrl.cluster.observation.facts import PodFacts, PodPhase, TrainerFacts
from polyrl.cluster.timestamps import unix
from polyrl.manifest.job import KIND
from polyrl.manifest.status import Failure
from polyrl.worker import Role

MESSAGE_LENGTH: Final = 1024
"""Characters of the trainer's last words that are kept."""


class Stage(Enum):
    RUNS = auto()
    SUSPENDED = auto()
    COMPLETE = auto()
    FAILED = auto()


ENDED = (Stage.COMPLETE, Stage.FAILED)


@dataclass(frozen=True)
class Life:
    """The stage, and when time alone may change it."""

    stage: Stage
    ended_at: float | None = None
    failure: Failure | None = None
    due: float | None = None

    @property
    def ended(self) -> bool:
        return self.stage in ENDED


def life(look: Look) -> Life:
    """Of the job at this look."""
    told = {known.type for known in look.status.conditions if known.status == "True"}
    ended_at = unix(look.status.completion_time) or look.now
    if "Complete" in told:
        return Life(Stage.COMPLETE, ended_at)
    if "Failed" in told:
        return Life(Stage.FAILED, ended_at, look.status.failure)
    trainer = look.facts.trainer
    if trainer is not None and trainer.complete_at is not None:
        return Life(Stage.COMPLETE, trainer.complete_at)
    if trainer is not None and trainer.failed_at is not None:
        return Life(Stage.FAILED, trainer.failed_at, _failure(look, trainer))
    due = _deadline(look)
    if due is not None and look.now >= due:
        limit = look.spec.active_deadline_seconds
        said = f"the job ran longer than its activeDeadlineSeconds ({limit})"
        return Life(Stage.FAILED, look.now, Failure(reason="DeadlineExceeded", message=said))
    if look.spec.suspend:
        return Life(Stage.SUSPENDED)
    return Life(Stage.RUNS, due=due)


def active_s(look: Look) -> float:
    """Seconds that the job has run, time suspended left out."""
    resumed_at = unix(look.status.last_resume_time)
    return look.status.active_millis / 1000 + (0.0 if resumed_at is None else max(0.0, look.now - resumed_at))


def farewell(look: Look, now: Life) -> tuple[list[Delete], float | None]:
    """The deletion of the finished job itself when it is due, or when it will be."""
    ttl = look.spec.ttl_seconds_after_finished
    if ttl is None or now.ended_at is None:
        return [], None
    due = now.ended_at + ttl
    if look.now < due:
        return [], due
    return [Delete(KIND, look.facts.name, look.facts.uid, f"it ended more than {ttl} s ago")], None


def _deadline(look: Look) -> float | None:
    """When the running time is used up, if it goes on; of a suspended job only whether it is."""
    limit = look.spec.active_deadline_seconds
    if limit is None or look.status.start_time is None:
        return None
    left = limit - active_s(look)
    return look.now + left if left <= 0 or look.status.last_resume_time is not None else None


def _failure(look: Look, trainer: TrainerFacts) -> Failure:
    pod = _culprit(look)
    code = next((end.code for end in pod.exits if end.code != 0), None) if pod is not None else None
    said = trainer.failed_message or "the trainer's Job failed"
    return Failure(
        reason=trainer.failed_reason or "TrainerFailed",
        message=(said if code is None else f"the trainer ended with status {code}: {said}")[:MESSAGE_LENGTH],
        exit_code=code if code is None or 0 <= code <= 255 else None,
        pod_name=pod.name if pod is not None else "",
    )


def _culprit(look: Look) -> PodFacts | None:
    """The newest trainer pod that failed by itself."""
    failed = [pod for pod in look.facts.of_role(Role.TRAINER) if pod.phase is PodPhase.FAILED]
    return next((pod for pod in reversed(failed) if not pod.disruption), failed[-1] if failed else None)
