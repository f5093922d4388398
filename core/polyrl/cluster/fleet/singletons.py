"""What a job has one of: fixed children, the manager's pod, the trainer's Job.

The manager: a new pod, under a new name, once the old one has ended or is gone. Never two at a time: both would write
the journal. One that is being deleted, or whose node fell silent, is waited for (see `removal`).
The trainer's Job restarts its own pods. It is suspended and resumed with the job, and never deleted while it runs; a
suspended one whose template was changed is deleted, and made anew when the job goes on, but not before its last pod has
ended: Job.status.active says 0 as soon as pods are being deleted. One that goes on waits for them by itself
(podReplacementPolicy).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from polyrl.cluster import names
from polyrl.cluster.actions import (
    Action,
    Annotate,
    Apply,
    Create,
    Delete,
    FindTrainer,
    LimitRestarts,
    MakeKeys,
    SuspendTrainer,
)
from polyrl.cluster.fleet.removal import release
from polyrl.cluster.lifecycle import Lifecycle, LifecycleStage, cannot_go_on, is_edited
from polyrl.cluster.observation.context import UNREACHABLE_POLLS, ReconcileContext
from polyrl.cluster.observation.disruption import DisruptionNotice, is_dead, notice_of
from polyrl.cluster.observation.exactly_once import LossCounter, assign_numbers, loss_number_of, total
from polyrl.cluster.observation.facts import ChildFacts, PodFacts, PodPhase
from polyrl.cluster.resources.fixed import fixed_children, manager_hosts
from polyrl.cluster.resources.workers import manager_pod, trainer_job
from polyrl.cluster.state import LastSeenPod
from polyrl.cluster.timestamps import unix
from polyrl.worker import Role

MANAGER_PACE_S: Final = 10.0
"""Least time between two manager pods when the first one ended: one that no node runs must not be made in a loop."""

START_S: Final = 60.0
"""Within so long a pod that has a node starts its containers, unless it waits for an image or fetches a model; else the
Secret that it mounts may be gone. No list shows that: whoever may list Secrets may read them all."""

KEPT_AS_MADE: Final = ("PersistentVolumeClaim", "ConfigMap", "ServiceAccount")
"""Kinds whose content cannot be changed in place, or is not worth the right to change every account of a cluster: no
pod has a token of a job's."""

OPTIONAL: Final = ("PodDisruptionBudget", "NetworkPolicy")
"""Kinds that go when the job no longer asks for them."""


def children(ctx: ReconcileContext) -> Iterator[Action]:
    """What is needed to make the fixed children, and the Secrets, be as the job wants them."""
    present = {(child.kind, child.name): child for child in ctx.facts.children}
    keyed = ctx.wants_manager or ctx.spec.trainer.replicas > 1
    if keyed and (not _has_keys(ctx.facts.name, present) or _does_not_start(ctx)):
        yield MakeKeys(names.keys_secret_name(ctx.facts.name), manager_hosts(ctx.owner), now=ctx.now)
    wanted = ctx.hashes.fixed
    if any(_differs(place, content, present.get(place)) for place, content in wanted.items()):
        yield from _mended(ctx, present)
    for (kind, name), child in present.items():
        if kind in OPTIONAL and (kind, name) not in wanted and not child.deleting:
            yield Delete(kind, name, uid=child.uid, why="the job no longer asks for it")


def manager(ctx: ReconcileContext) -> tuple[list[Action], float | None]:
    """Actions for a running job's manager, and when time alone asks for another reconcile."""
    pods = ctx.facts.of_role(Role.MANAGER)
    ended = [pod for pod in pods if pod.ended]
    there = [pod for pod in pods if not pod.ended]
    lost = [pod for pod in there if pod.deletion_at is None and _is_lost(pod, ctx)]
    actions: list[Action] = [Delete("Pod", pod.name, uid=pod.uid, why="its node does not answer") for pod in lost]
    alive = [pod for pod in there if pod.deletion_at is None and pod not in lost]
    for twin in alive[1:]:
        actions += release(twin, "there is one manager at a time")
    if there:
        return actions, None
    due = max((pod.created_at + MANAGER_PACE_S for pod in ended), default=ctx.now)
    if ctx.now < due:
        return actions, due
    actions += [Delete("Pod", pod.name, uid=pod.uid, why="it ended") for pod in ended if pod.deletion_at is None]
    why = "the one before ended or is gone" if ctx.status.manager.created else "the job begins"
    return [*actions, Create(manager_pod(ctx.owner, ctx.highest_ordinal(Role.MANAGER) + 1), why)], None


def trainer(ctx: ReconcileContext, now: Lifecycle) -> Iterator[Action]:
    """Actions for the trainer's Job at this stage of the job's life."""
    job, name = ctx.facts.trainer, names.trainer_name(ctx.facts.name)
    if job is None:
        yield from _another_trainer(ctx, now)
        return
    if job.deleting or job.complete_at is not None:
        return
    if job.failed_at is not None:
        edited = now.stage is LifecycleStage.RUNS and is_edited(ctx, job) and cannot_go_on(ctx, job)
        if (edited or now.stage is LifecycleStage.SUSPENDED) and not trainer_lives(ctx):
            yield Delete("Job", name, uid=job.uid, why="it could not go on; another is made when the job does")
        return
    if now.stage is LifecycleStage.RUNS and job.backoff_limit not in (None, ctx.spec.backoff_limit):
        yield LimitRestarts(name, ctx.spec.backoff_limit)
    if now.stage is not LifecycleStage.RUNS and not job.suspended:
        why = "the job failed" if now.ended else "spec.suspend"
        yield SuspendTrainer(name, True, why=why)
    elif now.stage is LifecycleStage.RUNS and job.suspended:
        if not is_edited(ctx, job):
            yield SuspendTrainer(name, False, why="the job goes on")
        elif not trainer_lives(ctx):
            yield Delete("Job", name, uid=job.uid, why="it is suspended and its template was changed; another is made")


def _another_trainer(ctx: ReconcileContext, now: Lifecycle) -> Iterator[Action]:
    """None beside pods that outlive their Job: another one would not count them."""
    if trainer_lives(ctx):
        yield FindTrainer(names.trainer_name(ctx.facts.name))
    elif now.stage is LifecycleStage.RUNS:
        yield Create(trainer_job(ctx.owner), "the job begins")


def disrupted(ctx: ReconcileContext) -> list[tuple[PodFacts, DisruptionNotice]]:
    """Pods of a running trainer that the cluster takes or took."""
    pods = [pod for pod in ctx.facts.of_role(Role.TRAINER) if not is_of_before(ctx, pod)]
    noted = [(pod, notice_of(pod, ctx)) for pod in pods]
    return [(pod, notice) for pod, notice in noted if notice is not None and notice.confirmed]


def is_of_before(ctx: ReconcileContext, pod: PodFacts) -> bool:
    """True for a trainer's pod of before a suspension, whose end was our decision, however long it takes."""
    resumed_at = unix(ctx.status.last_resume_time)
    # Pods' timestamps are whole seconds. Without a time the job goes on in this very reconcile.
    return resumed_at is None or pod.created_at < math.floor(resumed_at)


def trainer_numbers(ctx: ReconcileContext, vanished: Sequence[LastSeenPod]) -> Iterator[Annotate]:
    """Numbers the disrupted ones, so that each is counted once; `vanished` ones are counted without a number."""
    pods = ctx.facts.of_role(Role.TRAINER)
    reached = total(pods, LossCounter.DISRUPTION, ctx.status.trainer.disruptions, vanished)
    new = {pod.uid: (pod, notice) for pod, notice in disrupted(ctx) if loss_number_of(pod) is None}
    for uid, number in assign_numbers(new, LossCounter.DISRUPTION, reached, ctx.state.last_seen).items():
        pod, notice = new[uid]
        yield Annotate(
            pod.name, uid, annotations={names.ANNOTATION_COUNTED: str(number)}, why=f"it is taken away ({notice.why})"
        )


def trainer_lives(ctx: ReconcileContext) -> bool:
    """True while a pod of the trainer has not ended, be it being deleted: it may still write a checkpoint."""
    job = ctx.facts.trainer
    if any(not pod.ended for pod in ctx.facts.of_role(Role.TRAINER)):
        return True
    if job is None:
        return False
    # The Job's count may be ahead of the pods that we have seen, and behind the pod that its controller is making. One
    # that just went on is still reported as stopped.
    ends = (job.suspended and job.stopped) or job.deleting or job.complete_at is not None or job.failed_at is not None
    return not ends or job.active + job.terminating > 0


def lacks_pods(ctx: ReconcileContext) -> bool:
    """True while the trainer's Job is still to make a pod. Rollouts wait for it: what they take of a quota they keep,
    and the Job would be refused for ever."""
    there = sum(not pod.ended or pod.phase is PodPhase.SUCCEEDED for pod in ctx.facts.of_role(Role.TRAINER))
    return there < ctx.spec.trainer.replicas


def stop_manager(ctx: ReconcileContext, why: str) -> Iterator[Action]:
    """Lets the manager go, once neither trainer nor rollouts need it any more."""
    if trainer_lives(ctx) or any(not pod.ended for pod in ctx.facts.of_role(Role.ROLLOUT)):
        return
    for pod in ctx.facts.of_role(Role.MANAGER):
        yield from release(pod, why)


def _has_keys(job: str, present: Mapping[tuple[str, str], ChildFacts]) -> bool:
    """The Secret of all keys is there, and its copy for each role: one of other keys is none."""
    root = present.get(("Secret", names.keys_secret_name(job)))
    copies = [present.get(("Secret", names.role_secret_name(job, role))) for role in names.KEY_FILES]
    return root is not None and all(copy is not None and copy.content_hash == root.uid for copy in copies)


def _does_not_start(ctx: ReconcileContext) -> bool:
    """A pod of the manager's or the trainer's, for no reason that is known."""
    pods = (*ctx.facts.of_role(Role.MANAGER), *ctx.facts.of_role(Role.TRAINER))
    waiting = (pod for pod in pods if pod.phase is PodPhase.PENDING and not pod.unpulled and not pod.fetching)
    return any(pod.scheduled_at is not None and ctx.now - pod.scheduled_at >= START_S for pod in waiting)


def _differs(place: tuple[str, str], content: str, there: ChildFacts | None) -> bool:
    if there is None:
        return True
    return not there.deleting and place[0] not in KEPT_AS_MADE and there.content_hash != content


def _mended(ctx: ReconcileContext, present: Mapping[tuple[str, str], ChildFacts]) -> Iterator[Action]:
    for obj in fixed_children(ctx.owner):
        place = (obj["kind"], obj["metadata"]["name"])
        if place not in present:
            yield Create(obj, "the job needs it")
        elif _differs(place, ctx.hashes.fixed[place], present[place]):
            yield Apply(obj, "it is not as the job wants it")


def _is_lost(pod: PodFacts, ctx: ReconcileContext) -> bool:
    """Its node does not answer, and neither does it."""
    manager = ctx.facts.manager
    return (manager is None or manager.failed_polls >= UNREACHABLE_POLLS) and is_dead(pod, ctx)
