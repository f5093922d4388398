"""The conditions of a job, as `kubectl wait` and people read them: what holds, one word why, one sentence.

    Accepted  TrainerReady  RolloutAvailable  Progressing  CapacityLimited  ScalingActive  ScalingLimited  Disrupting
    Suspended; and, once it ended, exactly one of Complete and Failed

RolloutAvailable=False is no failure: the trainer goes on with its own engine. Sentences name no times that pass, so
that a condition changes only when something did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from polyrl.cluster.acceptance import QUOTA
from polyrl.cluster.fleet.pools import REASON_LENGTH
from polyrl.cluster.fleet.singletons import lacks_pods, trainer_lives
from polyrl.cluster.lifecycle import LifecycleStage
from polyrl.cluster.names import FETCH_CONTAINER, trainer_name
from polyrl.cluster.observation.facts import PodFacts
from polyrl.cluster.observation.rollouts import PodState
from polyrl.cluster.reasons import AcceptedReason, ConditionReason, FailureReason
from polyrl.cluster.reporting.assessment import Assessment
from polyrl.cluster.scaling.prices import affordable
from polyrl.cluster.timestamps import second, unix
from polyrl.manifest.parts.sources import summed_up
from polyrl.manifest.scaling import ScalingMode
from polyrl.manifest.status import Condition, DisruptionKind, Failure
from polyrl.status import StepValue
from polyrl.worker import FAILED_STARTS_LIMIT, Role

STALL_STEPS: Final = 5.0
"""Times the length of the last step after which a step counts as stalled."""

SHORTEST_STALL_S: Final = 300.0
"""No step is called stalled earlier; the first one's length is not known, and models load for minutes."""

MESSAGE_LENGTH: Final = 512
"""Characters of a sentence that are kept: schedulers and webhooks can go on for pages."""


class ConditionDraft(NamedTuple):
    """A condition without its type and its times."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


def conditions(assessment: Assessment) -> list[Condition]:
    """All conditions after this reconcile; lastTransitionTime moves only when a status flips."""
    before = {known.type: known for known in assessment.ctx.status.conditions}
    generation, now = assessment.ctx.facts.generation, assessment.ctx.now
    return [to_condition(type_, draft, before.get(type_), generation, now) for type_, draft in _drafts(assessment)]


def stall_due(assessment: Assessment) -> float | None:
    """When the step under way will count as stalled, if nothing happens; None: it does, or none is under way."""
    since, reported = unix(assessment.ctx.status.manager.step_time), assessment.ctx.manager_status
    if since is None or reported is None:
        return None
    return since + max(SHORTEST_STALL_S, STALL_STEPS * reported.values.get(StepValue.STEP_SECONDS, 0.0))


def to_condition(type_: str, draft: ConditionDraft, before: Condition | None, generation: int, now: float) -> Condition:
    """The condition to store, after `before` of the same type."""
    kept = before is not None and before.status == draft.status
    return Condition(
        type=type_,
        status=draft.status,
        reason=draft.reason,
        message=draft.message[:MESSAGE_LENGTH],
        last_transition_time=before.last_transition_time if before is not None and kept else second(now),
        observed_generation=generation,
    )


def _drafts(assessment: Assessment) -> Iterator[tuple[str, ConditionDraft]]:
    accepted, stage = assessment.accepted, assessment.lifecycle.stage
    yield "Accepted", _draft(accepted.verdict, accepted.reason, accepted.message)
    idle = _idle(assessment)
    for type_, decide in _OF_A_RUNNING_JOB.items():
        yield type_, idle or decide(assessment)
    yield "ScalingLimited", _scaling_limited(assessment)
    yield "Disrupting", _disrupting(assessment)
    yield "Suspended", _suspended(assessment)
    if stage is LifecycleStage.COMPLETE:
        yield "Complete", _draft(True, ConditionReason.TRAINER_COMPLETE, "the trainer is done")
    if stage is LifecycleStage.FAILED:
        failure = assessment.lifecycle.failure or Failure(reason=FailureReason.TRAINER_FAILED, message="it failed")
        yield "Failed", _draft(True, failure.reason, failure.message)


def _draft(holds: bool | None, reason: str, message: str) -> ConditionDraft:
    return ConditionDraft("Unknown" if holds is None else "True" if holds else "False", reason, message=message)


def _suspended(assessment: Assessment) -> ConditionDraft:
    """Whoever waits for it takes the machines away: it holds once nothing of ours runs on them."""
    if assessment.lifecycle.stage is not LifecycleStage.SUSPENDED:
        return _draft(False, ConditionReason.NOT_SUSPENDED, "spec.suspend is false")
    left = sum(not pod.ended for pod in assessment.ctx.facts.pods)
    if left or trainer_lives(assessment.ctx):
        message = f"spec.suspend is true; pods that have not ended: {left}{_left_alone(assessment)}"
        return _draft(False, ConditionReason.SUSPENDING, message)
    return _draft(True, ConditionReason.SUSPENDED, "spec.suspend is true")


def _idle(assessment: Assessment) -> ConditionDraft | None:
    """Why nothing is expected to run; None when it is."""
    if assessment.lifecycle.ended:
        return _draft(False, ConditionReason.FINISHED, "the job has ended")
    if assessment.lifecycle.stage is LifecycleStage.SUSPENDED:
        return _draft(False, ConditionReason.SUSPENDED, "the job is suspended")
    if assessment.lifecycle.stage is LifecycleStage.STUCK:
        return _draft(False, AcceptedReason.CANNOT_GO_ON, "the trainer cannot go on; the condition Accepted says more")
    return None


def _trainer_ready(assessment: Assessment) -> ConditionDraft:
    job = assessment.ctx.facts.trainer
    if assessment.trainer_ready:
        return _draft(True, ConditionReason.READY, "the trainer is ready")
    newest = assessment.ctx.facts.of_role(Role.TRAINER)[-1:]
    if refused := _refused_child(assessment):
        return refused
    for pod, notice in assessment.trainers_disrupted:
        if pod in newest:
            return _draft(False, ConditionReason.DISRUPTED, f"{pod.name} is taken away: {notice.why}")
    for pod in newest if job is None else ():
        message = f"{pod.name} has not ended, and another trainer starts once it has{_left_alone(assessment)}"
        return _draft(False, ConditionReason.POD_WITHOUT_JOB, message)
    first = [*assessment.ctx.facts.of_role(Role.MANAGER)[-1:], *newest]
    if waiting := _not_pulled(first) or _not_placed(first) or _not_started(first):
        return waiting
    if assessment.unreachable:
        return _draft(False, ConditionReason.MANAGER_UNREACHABLE, "the manager does not answer")
    if job is not None and job.failed > 0 and job.ready == 0:
        return _draft(False, ConditionReason.CRASH_LOOP, f"the trainer failed {job.failed} times and starts again")
    if fetching := [pod.name for pod in assessment.ctx.facts.of_role(Role.TRAINER) if pod.fetching]:
        path = summed_up(assessment.ctx.spec.recipe.fetchable)[:REASON_LENGTH]
        log = f"kubectl logs {fetching[0]}"
        reports = assessment.ctx.manager_status.fetches if assessment.ctx.manager_status is not None else ()
        known = next((fetch for pod in fetching for fetch in reports if fetch.pod == pod), None)
        message = (
            f"{fetching[0]} fetches {path}; {log} -c {FETCH_CONTAINER} tells how much has come"
            if known is None
            else f"{known.pod} has fetched {known.amount} of {path}"
        )
        return _draft(False, ConditionReason.FETCHING_MODEL, message)
    if job is not None and lacks_pods(assessment.ctx):
        why = f"kubectl describe job {trainer_name(assessment.ctx.facts.name)} says why"
        waits = "; rollouts are made once it has" if assessment.ctx.wants_rollouts else ""
        return _draft(False, ConditionReason.STARTING, f"its Job has not made its pod yet ({why}){waits}")
    return _draft(False, ConditionReason.STARTING, "the trainer starts")


def _left_alone(assessment: Assessment) -> str:
    """What is to be done about a trainer's pod that nobody ends; empty: there is none."""
    pods = assessment.ctx.facts.of_role(Role.TRAINER) if assessment.ctx.facts.trainer is None else ()
    names = [pod.name for pod in pods if not pod.ended and pod.deletion_at is None]
    return f": delete {', '.join(names)}, for no Job of this job's has it" if names else ""


def _refused_child(assessment: Assessment) -> ConditionDraft | None:
    message = assessment.refused_child
    word = ConditionReason.QUOTA_EXCEEDED if QUOTA in message else ConditionReason.REFUSED
    return _draft(False, word, f"no pod starts without it: {message[:REASON_LENGTH]}") if message else None


def _not_pulled(pods: Sequence[PodFacts]) -> ConditionDraft | None:
    """The first pod that waits for an image in vain. Kubelets try for ever and tell two reasons in turns, which would
    write the status each time; so this sentence names none."""
    for pod in pods:
        if pod.unpulled and not pod.ended:
            image = pod.unpulled[:REASON_LENGTH]
            message = f"{pod.name} cannot pull {image}: push it, or name another in the template or the chart's images"
            return _draft(False, ConditionReason.IMAGE_NOT_PULLED, message)
    return None


def _not_placed(pods: Sequence[PodFacts]) -> ConditionDraft | None:
    for pod in pods:
        if pod.unschedulable and not pod.ended:
            message = f"{pod.name} waits for a node: {pod.unschedulable[:REASON_LENGTH]}"
            return _draft(False, ConditionReason.UNSCHEDULABLE, message)
    return None


def _not_started(pods: Sequence[PodFacts]) -> ConditionDraft | None:
    for pod in pods:
        if (words := pod.crashes or pod.unstarted) and not pod.ended:
            reason = ConditionReason.CRASH_LOOP if pod.crashes else ConditionReason.STARTING
            return _draft(False, reason, f"{pod.name}: {words[:REASON_LENGTH]}")
    return None


def _rollout_available(assessment: Assessment) -> ConditionDraft:
    serving = assessment.serving
    if assessment.scale.desired_replicas == 0 and serving == 0:
        return _draft(False, ConditionReason.NOT_WANTED, "no rollouts are desired")
    need = max(1, assessment.ctx.spec.rollout.min_replicas)
    if serving >= need:
        return _draft(True, ConditionReason.REGISTERED, f"at least {need} rollouts serve")
    if refused := _refused_child(assessment):
        return refused
    if unpulled := _not_pulled([one.pod for one in assessment.in_state(PodState.STARTING)]):
        return unpulled
    failing = [view.status for view in assessment.views if view.status.failed_starts >= FAILED_STARTS_LIMIT]
    if failing:
        message = f"the last {failing[0].failed_starts} rollouts on {failing[0].name} failed before they registered"
        return _draft(False, ConditionReason.FAILED_STARTS, f"{message}; another is tried now and then")
    if any(view.held for view in assessment.views):
        message = "no capacity in any pool; training continues on the reserved engines"
        return _draft(False, ConditionReason.NO_CAPACITY, message)
    if assessment.in_state(PodState.PREEMPTED) and not assessment.live:
        return _draft(False, ConditionReason.ALL_PREEMPTED, "every rollout was taken away")
    return _draft(False, ConditionReason.BELOW_MINIMUM, f"fewer than {need} rollouts serve")


def _progressing(assessment: Assessment) -> ConditionDraft:
    reported, due = assessment.ctx.manager_status, stall_due(assessment)
    if reported is None or due is None or not reported.phase:
        return _draft(None, ConditionReason.NOT_STARTED, "no step is under way yet")
    if reported.step == assessment.ctx.status.manager.step and assessment.ctx.now >= due:
        message = f"step {reported.step} takes more than {STALL_STEPS:.0f} times as long"
        return _draft(False, ConditionReason.STALLED, message)
    return _draft(True, ConditionReason.STEP_ADVANCED, f"step {reported.step} is under way")


def _capacity_limited(assessment: Assessment) -> ConditionDraft:
    refusal = assessment.ctx.state.refusal
    if refusal is not None and (not refusal.of_pods or len(assessment.live) < assessment.scale.desired_replicas):
        word = ConditionReason.QUOTA_EXCEEDED if QUOTA in refusal.message else ConditionReason.REFUSED
        return _draft(True, word, refusal.message[:REASON_LENGTH])
    held = [view.status for view in assessment.views if view.held]
    if held:
        spot = held[0].name == "spot" and held[0].backoff_until is not None
        message = f"{held[0].name}: {held[0].last_reason or 'rollouts failed'}"
        return _draft(True, ConditionReason.SPOT_UNAVAILABLE if spot else ConditionReason.BACKING_OFF, message)
    waiting = [one for one in assessment.in_state(PodState.PENDING) if one.pod.unschedulable]
    if waiting:
        message = f"{len(waiting)} rollouts wait for a node: {waiting[0].pod.unschedulable[:REASON_LENGTH]}"
        return _draft(True, ConditionReason.UNSCHEDULABLE, message)
    return _draft(False, ConditionReason.ENOUGH, "all requested capacity is available")


def _scaling_active(assessment: Assessment) -> ConditionDraft:
    return _draft(assessment.scale.active, assessment.scale.reason, assessment.scale.message)


_OF_A_RUNNING_JOB: Final[dict[str, Callable[[Assessment], ConditionDraft]]] = {
    "TrainerReady": _trainer_ready,
    "RolloutAvailable": _rollout_available,
    "Progressing": _progressing,
    "CapacityLimited": _capacity_limited,
    "ScalingActive": _scaling_active,
}
"""By type: conditions of which a job that does not run says only why it does not."""


def _scaling_limited(assessment: Assessment) -> ConditionDraft:
    spec, scaling = assessment.ctx.spec, assessment.scale.scaling
    by_gap, least, most = spec.scaling.mode is ScalingMode.GAP, spec.rollout.min_replicas, spec.rollout.max_replicas
    requested, paid = scaling.recommended_replicas if by_gap else spec.rollout.replicas, affordable(spec, most)
    if requested is not None and not (by_gap and scaling.last_step_time is None):
        if paid < most and requested >= paid + (not by_gap):
            # The gap asks for no more than is paid for.
            message = f"budgetPerHour pays for {paid} rollouts"
            return _draft(True, ConditionReason.OVER_BUDGET, message)
        if requested > most:
            message = f"{requested} are asked for, maxReplicas is {most}"
            return _draft(True, ConditionReason.TOO_MANY_REPLICAS, message)
        if requested < least:
            message = f"{requested} are asked for, minReplicas is {least}"
            return _draft(True, ConditionReason.TOO_FEW_REPLICAS, message)
    return _draft(False, ConditionReason.WITHIN_BOUNDS, "the number is within minReplicas and maxReplicas")


def _disrupting(assessment: Assessment) -> ConditionDraft:
    leaving = [one for one in assessment.in_state(PodState.PREEMPTED) if not one.pod.ended]
    if not leaving:
        return _draft(False, ConditionReason.UNDISTURBED, "no rollout is under a notice")
    notice = leaving[-1].notice
    word = notice.kind if notice is not None else DisruptionKind.UNKNOWN
    return _draft(True, word, f"{len(leaving)} rollouts are being taken away")
