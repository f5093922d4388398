"""Events on the job: what changed in this reconcile, one sentence for each kind of event however many pods it is about.

An event is what differs from the stored status, or what this reconcile is about to do: without a change there is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from polyrl.cluster.actions import RecordEvent
from polyrl.cluster.fleet.plan import FleetPlan
from polyrl.cluster.observation.rollouts import PodState
from polyrl.cluster.reasons import ConditionReason, EventReason
from polyrl.cluster.reporting.assessment import Assessment
from polyrl.manifest.scaling import ScalingMode
from polyrl.manifest.status import Condition, JobStatus, RunState

NAMED: Final = 3
"""Pods named in one sentence; the others are counted."""

_FLIP_EVENTS: Final = {
    ("Accepted", "True"): RecordEvent(EventReason.ACCEPTED, ""),
    ("Accepted", "False"): RecordEvent(EventReason.REFUSED, "", type="Warning"),
    ("TrainerReady", "True"): RecordEvent(EventReason.TRAINER_READY, ""),
    ("Progressing", "False"): RecordEvent(EventReason.STALLED, "", type="Warning"),
    ("CapacityLimited", "True"): RecordEvent(EventReason.CAPACITY_UNAVAILABLE, "", type="Warning"),
    ("ScalingActive", "False"): RecordEvent(EventReason.METRICS_STALE, "", type="Warning"),
    ("Suspended", "True"): RecordEvent(EventReason.SUSPENDED, ""),
    ("Complete", "True"): RecordEvent(EventReason.COMPLETED, ""),
    ("Failed", "True"): RecordEvent(EventReason.FAILED, "", type="Warning"),
}
"""By type and status of a condition that flips: the event, whose message is the condition's."""

_ONLY_FOR_REASON: Final = (EventReason.STALLED, EventReason.METRICS_STALE)
"""Events that are recorded only when the condition flipped for the reason of the same name."""


def condition_events(before: JobStatus, after: JobStatus) -> Iterator[RecordEvent]:
    """For conditions that flipped, refusals for another reason, and images that cannot be pulled."""
    previous = {known.type: known for known in before.conditions}
    for now in after.conditions:
        was = previous.get(now.type)
        refused_anew = was is not None and now.type == "Accepted" and was.reason != now.reason
        if was is None or was.status != now.status or refused_anew:
            yield from _flip_event(now)
        # Whoever follows a job that was never ready sees nothing flip.
        if now.reason == ConditionReason.IMAGE_NOT_PULLED and (was is None or was.reason != now.reason):
            yield RecordEvent(EventReason.IMAGE_NOT_PULLED, now.message, type="Warning")
    if before.state is RunState.SUSPENDED and after.state in (RunState.PENDING, RunState.RUNNING, RunState.DEGRADED):
        yield RecordEvent(EventReason.RESUMED, "the job goes on from its journal and its newest checkpoint")


def fleet_events(assessment: Assessment, plan: FleetPlan) -> Iterator[RecordEvent]:
    """Events about rollouts of a running job."""
    yield from _losses(assessment)
    made = {pool.value: number for pool, number in plan.made.items() if number}
    if made:
        yield RecordEvent(EventReason.ROLLOUT_CREATED, f"{sum(made.values())} rollouts are made: {_sum_of(made)}")
    if plan.standing_in:
        yield RecordEvent(EventReason.FALLBACK_ON_DEMAND, f"{plan.standing_in} on-demand rollouts stand in for spot")
    if plan.released:
        message = f"{sum(plan.released.values())} rollouts are released: {_sum_of(plan.released)}"
        yield RecordEvent(EventReason.ROLLOUT_RELEASED, message)
    if assessment.scale.changed:
        grows = assessment.scale.desired_replicas > assessment.ctx.status.rollout.desired_replicas
        reason = EventReason.ROLLOUT_SCALED_UP if grows else EventReason.ROLLOUT_SCALED_DOWN
        yield RecordEvent(reason, assessment.scale.changed)
    yield from _ignored(assessment)


def _flip_event(now: Condition) -> Iterator[RecordEvent]:
    event = _FLIP_EVENTS.get((now.type, now.status))
    if event is not None and (event.reason not in _ONLY_FOR_REASON or now.reason == event.reason):
        yield replace(event, message=now.message)


def _losses(assessment: Assessment) -> Iterator[RecordEvent]:
    preempted = [one for one in assessment.in_state(PodState.PREEMPTED) if one.loss_number is None]
    vanished = [pod.name for pod in assessment.vanished if not pod.loss_number]
    if preempted or vanished:
        kinds = Counter(one.notice.kind.value for one in preempted if one.notice is not None)
        kinds["PodDeleted"] += len(vanished)
        names = [one.pod.name for one in preempted] + vanished
        message = f"{len(names)} rollouts are taken away: {_sum_of(+kinds)} ({_named(names)})"
        yield RecordEvent(EventReason.ROLLOUT_PREEMPTED, message, type="Warning")
    failed = [one for one in assessment.in_state(PodState.FAILED) if one.loss_number is None]
    if failed:
        message = f"{len(failed)} rollouts failed: {failed[0].why} ({_named([one.pod.name for one in failed])})"
        yield RecordEvent(EventReason.ROLLOUT_FAILED, message, type="Warning")


def _ignored(assessment: Assessment) -> Iterator[RecordEvent]:
    """In mode Gap a later write of `replicas` moves nothing; who wrote it should know."""
    ctx, desired = assessment.ctx, assessment.scale.desired_replicas
    edited = 0 < ctx.status.observed_generation != ctx.facts.generation
    replicas = ctx.spec.rollout.replicas
    if ctx.spec.scaling.mode is ScalingMode.GAP and edited and replicas not in (None, desired):
        message = f"rollout.replicas ({replicas}) is only the start value in scaling mode Gap; {desired} are desired"
        yield RecordEvent(EventReason.REPLICAS_IGNORED, message, type="Warning")


def _sum_of(counts: dict[str, int] | Counter[str]) -> str:
    return ", ".join(f"{number} {word}" for word, number in counts.items())


def _named(names: Sequence[str]) -> str:
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
