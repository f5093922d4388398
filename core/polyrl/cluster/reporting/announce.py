"""Events on the job: what changed in this look, one sentence for each kind of news however many pods it is about.

News is what differs from the stored status, or what this look is about to do, so that a look without news is silent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from polyrl.cluster.actions import RecordEvent
from polyrl.cluster.fleet.plan import FleetPlan
from polyrl.cluster.observation.rollouts import PodState
from polyrl.cluster.reporting.assessment import Assessment
from polyrl.manifest.scaling import ScalingMode
from polyrl.manifest.status import Condition, JobStatus, RunState

NAMED: Final = 3
"""Pods named in one sentence; the others are counted."""

_FLIP_EVENTS: Final = {
    ("Accepted", "True"): ("Accepted", "Normal"),
    ("Accepted", "False"): ("Refused", "Warning"),
    ("TrainerReady", "True"): ("TrainerReady", "Normal"),
    ("Progressing", "False"): ("Stalled", "Warning"),
    ("CapacityLimited", "True"): ("CapacityUnavailable", "Warning"),
    ("ScalingActive", "False"): ("MetricsStale", "Warning"),
    ("Suspended", "True"): ("Suspended", "Normal"),
    ("Complete", "True"): ("Completed", "Normal"),
    ("Failed", "True"): ("Failed", "Warning"),
}
"""What is said when a condition flips to a status: reason and type of the event."""

_ONLY_FOR: Final = {"Stalled": "Stalled", "MetricsStale": "MetricsStale"}
"""Events that are said only when the condition flipped for this reason."""


def condition_events(before: JobStatus, after: JobStatus) -> Iterator[RecordEvent]:
    """News of the conditions."""
    stood = {known.type: known for known in before.conditions}
    for now in after.conditions:
        was = stood.get(now.type)
        if was is None or was.status != now.status:
            yield from _flip_event(now)
    if before.state is RunState.SUSPENDED and after.state in (RunState.PENDING, RunState.RUNNING, RunState.DEGRADED):
        yield RecordEvent("Resumed", "the job goes on from its journal and its newest checkpoint")


def fleet_events(assessment: Assessment, plan: FleetPlan) -> Iterator[RecordEvent]:
    """News of rollouts, for a running job."""
    yield from _losses(assessment)
    made = {pool.value: number for pool, number in plan.made.items() if number}
    if made:
        yield RecordEvent("RolloutCreated", f"{sum(made.values())} rollouts are made: {_sum_of(made)}")
    if plan.standing_in:
        yield RecordEvent("FallbackOnDemand", f"{plan.standing_in} on-demand rollouts stand in for spot")
    if plan.released:
        yield RecordEvent(
            "RolloutReleased", f"{sum(plan.released.values())} rollouts are let go: {_sum_of(plan.released)}"
        )
    if assessment.scale.changed:
        grows = assessment.scale.desired_replicas > assessment.ctx.status.rollout.desired_replicas
        yield RecordEvent("RolloutScaledUp" if grows else "RolloutScaledDown", assessment.scale.changed)
    yield from _ignored(assessment)


def _flip_event(now: Condition) -> Iterator[RecordEvent]:
    message = _FLIP_EVENTS.get((now.type, now.status))
    if message is not None and now.reason == _ONLY_FOR.get(message[0], now.reason):
        yield RecordEvent(message[0], now.message, "Warning" if message[1] == "Warning" else "Normal")


def _losses(assessment: Assessment) -> Iterator[RecordEvent]:
    preempted = [one for one in assessment.in_state(PodState.PREEMPTED) if one.loss_number is None]
    vanished = [pod.name for pod in assessment.vanished if not pod.loss_number]
    if preempted or vanished:
        kinds = Counter(one.notice.kind.value for one in preempted if one.notice is not None)
        kinds["PodDeleted"] += len(vanished)
        names = [one.pod.name for one in preempted] + vanished
        message = f"{len(names)} rollouts are taken away: {_sum_of(+kinds)} ({_named(names)})"
        yield RecordEvent("RolloutPreempted", message, "Warning")
    failed = [one for one in assessment.in_state(PodState.FAILED) if one.loss_number is None]
    if failed:
        message = f"{len(failed)} rollouts failed: {failed[0].why} ({_named([one.pod.name for one in failed])})"
        yield RecordEvent("RolloutFailed", message, "Warning")


def _ignored(assessment: Assessment) -> Iterator[RecordEvent]:
    """In mode Gap a later write of `replicas` moves nothing; who wrote it should know."""
    status, facts, replicas = assessment.ctx.status, assessment.ctx.facts, assessment.ctx.spec.rollout.replicas
    edited = 0 < status.observed_generation != facts.generation
    if (
        assessment.ctx.spec.scaling.mode is ScalingMode.GAP
        and edited
        and replicas not in (None, assessment.scale.desired_replicas)
    ):
        desired = assessment.scale.desired_replicas
        message = f"rollout.replicas ({replicas}) is only the start value in scaling mode Gap; {desired} are wished"
        yield RecordEvent("ReplicasIgnored", message, "Warning")


def _sum_of(counts: dict[str, int] | Counter[str]) -> str:
    return ", ".join(f"{number} {word}" for word, number in counts.items())


def _named(names: Sequence[str]) -> str:
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
