"""The conditions of a job, as `kubectl wait` and people read them: what holds, one word why, one sentence.

    Accepted  TrainerReady  RolloutAvailable  Progressing  CapacityLimited  ScalingActive  ScalingLimited  Disrupting
    Suspended; and, once it ended, exactly one of Complete and Failed

RolloutAvailable=False is no failure: the trainer goes on with its own engine. Sentences name no times that pass, so
that a condition changes only when something did.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from polyrl.cluster.fleet.pools import REASON_LENGTH
from polyrl.cluster.lifecycle import LifecycleStage
from polyrl.cluster.observation.rollouts import PodState
from polyrl.cluster.reporting.assessment import Assessment
from polyrl.cluster.timestamps import second, unix
from polyrl.manifest.scaling import ScalingMode
from polyrl.manifest.status import Condition
from polyrl.status import StepValue
from polyrl.worker import Role

FAILED_STARTS: Final = 3
"""Rollouts that failed in a row before one registered: a wrong setting fails every time, bad luck does not."""

STALL_STEPS: Final = 5.0
"""Times the length of the last step after which a step counts as stalled."""

SHORTEST_STALL_S: Final = 300.0
"""No step is called stalled earlier; the first one's length is not known, and models load for minutes."""

MESSAGE_LENGTH: Final = 512
"""Characters of a sentence that are kept: schedulers and webhooks can go on for pages."""

Verdict = Literal["True", "False", "Unknown"]


class ConditionDraft(NamedTuple):
    """One condition without its times."""

    type: str
    status: Verdict
    reason: str
    message: str


def conditions(assessment: Assessment) -> list[Condition]:
    """All conditions after this look; lastTransitionTime moves only when a status flips."""
    before = {known.type: known for known in assessment.ctx.status.conditions}
    return [_condition(assessment, message, before.get(message.type)) for message in _all(assessment)]


def stall_due(assessment: Assessment) -> float | None:
    """When the step under way will count as stalled, if nothing happens; None: it does, or none is under way."""
    since = unix(assessment.ctx.status.manager.step_time)
    if since is None or assessment.ctx.manager_status is None:
        return None
    length = STALL_STEPS * assessment.ctx.manager_status.values.get(StepValue.STEP_SECONDS, 0.0)
    return since + max(SHORTEST_STALL_S, length)


def _condition(assessment: Assessment, message: ConditionDraft, before: Condition | None) -> Condition:
    kept = before is not None and before.status == message.status
    return Condition(
        type=message.type,
        status=message.status,
        reason=message.reason,
        message=message.message[:MESSAGE_LENGTH],
        last_transition_time=before.last_transition_time if before is not None and kept else second(assessment.ctx.now),
        observed_generation=assessment.ctx.facts.generation,
    )


def _all(assessment: Assessment) -> Iterator[ConditionDraft]:
    accepted: Verdict = "Unknown" if assessment.accepted.accepted is None else _verdict(assessment.accepted.accepted)
    yield ConditionDraft("Accepted", accepted, assessment.accepted.reason, assessment.accepted.message)
    yield _trainer_ready(assessment)
    yield _rollout_available(assessment)
    yield _progressing(assessment)
    yield _capacity_limited(assessment)
    yield _scaling_active(assessment)
    yield _scaling_limited(assessment)
    yield _disrupting(assessment)
    suspended = assessment.lifecycle.stage is LifecycleStage.SUSPENDED
    word, message = ("Suspended", "spec.suspend is true") if suspended else ("NotSuspended", "spec.suspend is false")
    yield ConditionDraft("Suspended", _verdict(suspended), word, message)
    if assessment.lifecycle.stage is LifecycleStage.COMPLETE:
        yield ConditionDraft("Complete", "True", "TrainerComplete", "the trainer is done")
    if assessment.lifecycle.stage is LifecycleStage.FAILED:
        failure = assessment.lifecycle.failure
        reason, message = (failure.reason, failure.message) if failure is not None else ("TrainerFailed", "it failed")
        yield ConditionDraft("Failed", "True", reason, message)


def _verdict(holds: bool) -> Verdict:
    return "True" if holds else "False"


def _idle(assessment: Assessment) -> tuple[str, str] | None:
    """Why nothing is expected to run; None when it is."""
    if assessment.lifecycle.ended:
        return "Finished", "the job has ended"
    if assessment.lifecycle.stage is LifecycleStage.SUSPENDED:
        return "Suspended", "the job is suspended"
    return None


def _trainer_ready(assessment: Assessment) -> ConditionDraft:
    job = assessment.ctx.facts.trainer
    if (idle := _idle(assessment)) is not None:
        return ConditionDraft("TrainerReady", "False", *idle)
    if assessment.trainer_ready:
        return ConditionDraft("TrainerReady", "True", "Ready", "the trainer is ready")
    newest = assessment.ctx.facts.of_role(Role.TRAINER)[-1:]
    vanished = [(pod, notice) for pod, notice in assessment.trainers_disrupted if pod in newest]
    if vanished:
        pod, notice = vanished[0]
        return ConditionDraft("TrainerReady", "False", "Disrupted", f"{pod.name} is taken away: {notice.why}")
    if assessment.unreachable:
        return ConditionDraft("TrainerReady", "False", "ManagerUnreachable", "the manager does not answer")
    if job is not None and job.failed > 0 and job.ready == 0:
        message = f"the trainer failed {job.failed} times and starts again"
        return ConditionDraft("TrainerReady", "False", "CrashLoop", message)
    return ConditionDraft("TrainerReady", "False", "Starting", "the trainer starts")


def _rollout_available(assessment: Assessment) -> ConditionDraft:
    desired, serving = assessment.scale.desired_replicas, assessment.serving
    if (idle := _idle(assessment)) is not None:
        return ConditionDraft("RolloutAvailable", "False", *idle)
    if desired == 0 and serving == 0:
        return ConditionDraft("RolloutAvailable", "False", "NotWanted", "no rollouts are wished")
    need = max(1, assessment.ctx.spec.rollout.min_replicas)
    if serving >= need:
        return ConditionDraft("RolloutAvailable", "True", "Registered", f"at least {need} rollouts serve")
    failing = [view.status for view in assessment.views if view.status.failed_starts >= FAILED_STARTS]
    if failing:
        message = f"the last {failing[0].failed_starts} rollouts on {failing[0].name} failed before they registered"
        return ConditionDraft("RolloutAvailable", "False", "FailedStarts", f"{message}; another is tried now and then")
    if any(view.held for view in assessment.views):
        return ConditionDraft(
            "RolloutAvailable", "False", "NoCapacity", "no machines are to be had; the trainer goes on alone"
        )
    if assessment.in_state(PodState.PREEMPTED) and not assessment.live:
        return ConditionDraft("RolloutAvailable", "False", "AllPreempted", "every rollout was taken away")
    return ConditionDraft("RolloutAvailable", "False", "BelowMinimum", f"fewer than {need} rollouts serve")


def _progressing(assessment: Assessment) -> ConditionDraft:
    if (idle := _idle(assessment)) is not None:
        return ConditionDraft("Progressing", "False", *idle)
    reported, due = assessment.ctx.manager_status, stall_due(assessment)
    if reported is None or due is None or not reported.phase:
        return ConditionDraft("Progressing", "Unknown", "NotStarted", "no step is under way yet")
    if reported.step == assessment.ctx.status.manager.step and assessment.ctx.now >= due:
        return ConditionDraft(
            "Progressing", "False", "Stalled", f"step {reported.step} takes more than {STALL_STEPS:.0f} times as long"
        )
    return ConditionDraft("Progressing", "True", "StepAdvanced", f"step {reported.step} is under way")


def _capacity_limited(assessment: Assessment) -> ConditionDraft:
    if (idle := _idle(assessment)) is not None:
        return ConditionDraft("CapacityLimited", "False", *idle)
    refusal = assessment.ctx.state.refusal
    if refusal is not None and len(assessment.live) < assessment.scale.desired_replicas:
        word = "QuotaExceeded" if "exceeded quota" in refusal.message else "Refused"
        return ConditionDraft("CapacityLimited", "True", word, refusal.message[:REASON_LENGTH])
    held = [view.status for view in assessment.views if view.held]
    if held:
        spot = held[0].name == "spot" and held[0].backoff_until is not None
        message = held[0].last_reason or "rollouts failed"
        return ConditionDraft(
            "CapacityLimited", "True", "SpotUnavailable" if spot else "BackingOff", f"{held[0].name}: {message}"
        )
    waiting = [one for one in assessment.in_state(PodState.PENDING) if one.pod.unschedulable]
    if waiting:
        message = waiting[0].pod.unschedulable[:REASON_LENGTH]
        return ConditionDraft(
            "CapacityLimited", "True", "Unschedulable", f"{len(waiting)} rollouts wait for a node: {message}"
        )
    return ConditionDraft("CapacityLimited", "False", "Enough", "what is asked for is given")


def _scaling_active(assessment: Assessment) -> ConditionDraft:
    if (idle := _idle(assessment)) is not None:
        return ConditionDraft("ScalingActive", "False", *idle)
    return ConditionDraft(
        "ScalingActive", _verdict(assessment.scale.active), assessment.scale.reason, assessment.scale.message
    )


def _scaling_limited(assessment: Assessment) -> ConditionDraft:
    spec, scaling = assessment.ctx.spec, assessment.scale.scaling
    asked = scaling.recommended_replicas if spec.scaling.mode is ScalingMode.GAP else spec.rollout.replicas
    measurement = spec.scaling.mode is not ScalingMode.GAP or scaling.last_step_time is not None
    if measurement and asked is not None and asked > spec.rollout.max_replicas:
        message = f"{asked} are asked for, maxReplicas is {spec.rollout.max_replicas}"
        return ConditionDraft("ScalingLimited", "True", "TooManyReplicas", message)
    if measurement and asked is not None and asked < spec.rollout.min_replicas:
        message = f"{asked} are asked for, minReplicas is {spec.rollout.min_replicas}"
        return ConditionDraft("ScalingLimited", "True", "TooFewReplicas", message)
    return ConditionDraft("ScalingLimited", "False", "WithinBounds", "the number is within minReplicas and maxReplicas")


def _disrupting(assessment: Assessment) -> ConditionDraft:
    preempted = [one for one in assessment.in_state(PodState.PREEMPTED) if not one.pod.ended]
    if not preempted:
        return ConditionDraft("Disrupting", "False", "Undisturbed", "no rollout is under a notice")
    notice = preempted[-1].notice
    word = notice.kind.value if notice is not None else "Unknown"
    return ConditionDraft("Disrupting", "True", word, f"{len(preempted)} rollouts are being taken away")
