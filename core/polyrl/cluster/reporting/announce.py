"""Events on the job: what changed in this look, one sentence for each kind of news however many pods it is about.

News is what differs from the stored status, or what this look is about to do, so that a look without news is silent.
Refuses to hold: conditions (see `conditions`), decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from polyrl.cluster.actions import Say
from polyrl.cluster.fleet.plan import Plan
from polyrl.cluster.observation.rollouts import Standing
from polyrl.cluster.reporting.assessment import Judged
from polyrl.manifest.scaling import ScalingMode
from polyrl.manifest.status import Condition, JobStatus, RunState

NAMED: Final = 3
"""Pods named in one sentence; the others are counted."""

_FLIPS: Final = {
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


def flips(before: JobStatus, after: JobStatus) -> Iterator[Say]:
    """News of the conditions."""
    stood = {known.type: known for known in before.conditions}
    for now in after.conditions:
        was = stood.get(now.type)
        if was is None or was.status != now.status:
            yield from _flip(now)
    if before.state is RunState.SUSPENDED and after.state in (RunState.PENDING, RunState.RUNNING, RunState.DEGRADED):
        yield Say("Resumed", "the job goes on from its journal and its newest checkpoint")


def fleet_news(judged: Judged, plan: Plan) -> Iterator[Say]:
    """News of rollouts, for a running job."""
    yield from _losses(judged)
    made = {pool.value: number for pool, number in plan.made.items() if number}
    if made:
        yield Say("RolloutCreated", f"{sum(made.values())} rollouts are made: {_sum_of(made)}")
    if plan.standing_in:
        yield Say("FallbackOnDemand", f"{plan.standing_in} on-demand rollouts stand in for spot")
    if plan.let_go:
        yield Say("RolloutReleased", f"{sum(plan.let_go.values())} rollouts are let go: {_sum_of(plan.let_go)}")
    if judged.wish.changed:
        grows = judged.wish.wished > judged.look.status.rollout.desired_replicas
        yield Say("RolloutScaledUp" if grows else "RolloutScaledDown", judged.wish.changed)
    yield from _ignored(judged)


def _flip(now: Condition) -> Iterator[Say]:
    said = _FLIPS.get((now.type, now.status))
    if said is not None and now.reason == _ONLY_FOR.get(said[0], now.reason):
        yield Say(said[0], now.message, "Warning" if said[1] == "Warning" else "Normal")


def _losses(judged: Judged) -> Iterator[Say]:
    taken = [one for one in judged.standing(Standing.TAKEN) if one.counted is None]
    gone = [pod.name for pod in judged.vanished if not pod.mark]
    if taken or gone:
        kinds = Counter(one.notice.kind.value for one in taken if one.notice is not None)
        kinds["PodDeleted"] += len(gone)
        names = [one.pod.name for one in taken] + gone
        said = f"{len(names)} rollouts are taken away: {_sum_of(+kinds)} ({_named(names)})"
        yield Say("RolloutPreempted", said, "Warning")
    failed = [one for one in judged.standing(Standing.FAILED) if one.counted is None]
    if failed:
        said = f"{len(failed)} rollouts failed: {failed[0].why} ({_named([one.pod.name for one in failed])})"
        yield Say("RolloutFailed", said, "Warning")


def _ignored(judged: Judged) -> Iterator[Say]:
    """In mode Gap a later write of `replicas` moves nothing; who wrote it should know."""
    status, facts, replicas = judged.look.status, judged.look.facts, judged.look.spec.rollout.replicas
    edited = 0 < status.observed_generation != facts.generation
    if judged.look.spec.scaling.mode is ScalingMode.GAP and edited and replicas not in (None, judged.wish.wished):
        wished = judged.wish.wished
        said = f"rollout.replicas ({replicas}) is only the start value in scaling mode Gap; {wished} are wished"
        yield Say("ReplicasIgnored", said, "Warning")


def _sum_of(counts: dict[str, int] | Counter[str]) -> str:
    return ", ".join(f"{number} {word}" for word, number in counts.items())


def _named(names: Sequence[str]) -> str:
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
