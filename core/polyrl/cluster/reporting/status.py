"""The status to store after a look: whole numbers, bounded lists, counters that only grow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from polyrl.cluster import names
from polyrl.cluster.fleet.plan import rollouts_made
from polyrl.cluster.fleet.singletons import managers_made
from polyrl.cluster.lifecycle import LifecycleStage, active_s
from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.exactly_once import LossCounter, parse_loss_number, total
from polyrl.cluster.observation.facts import PodFacts
from polyrl.cluster.observation.node_signals import DisruptionKind
from polyrl.cluster.observation.rollouts import PodState, of_pool
from polyrl.cluster.reporting.assessment import Assessment
from polyrl.cluster.reporting.conditions import FAILED_STARTS, conditions
from polyrl.cluster.reporting.cost import cost
from polyrl.cluster.state import LastSeenPod
from polyrl.cluster.timestamps import millisecond, second, unix
from polyrl.manifest.status import (
    Condition,
    Disruption,
    JobStatus,
    ManagerSummary,
    RolloutStatus,
    RunState,
    TrainerStatus,
)
from polyrl.sample import Pool
from polyrl.worker import Role

CONTACT_EVERY_S: Final = 60.0
"""lastContactTime is moved no more often: hearing nothing new from the manager is no reason to write."""


def status_of(assessment: Assessment) -> JobStatus:
    """Everything anew from this look, on top of what only the stored status knows."""
    ctx = assessment.ctx
    ended_before = ctx.status.completion_time is not None
    closing = assessment.lifecycle.ended and not ended_before
    status = JobStatus(
        observed_generation=ctx.facts.generation,
        state=_state(assessment),
        conditions=conditions(assessment),
        completion_time=second(assessment.lifecycle.ended_at)
        if closing and assessment.lifecycle.ended_at
        else ctx.status.completion_time,
        run_id=ctx.facts.uid,
        manager=_manager(ctx),
        trainer=_trainer(assessment),
        rollout=_rollout(assessment),
        scaling=assessment.scale.scaling,
        cost=ctx.status.cost if ended_before else cost(ctx, closing=closing),
        recent_disruptions=recent(assessment),
        failure=assessment.lifecycle.failure,
    )
    return status.model_copy(update=_times(assessment))


def refused(stored: JobStatus, generation: int, sentence: str, now: float) -> JobStatus:
    """Of an object that is no job this version understands; what was known of it stays."""
    before = next((known for known in stored.conditions if known.type == "Accepted"), None)
    stands = before is not None and before.status == "False"
    accepted = Condition(
        type="Accepted",
        status="False",
        reason="Invalid",
        message=sentence,
        last_transition_time=before.last_transition_time if before is not None and stands else second(now),
        observed_generation=generation,
    )
    rest = [known for known in stored.conditions if known.type != "Accepted"]
    return stored.model_copy(update={"observed_generation": generation, "conditions": [accepted, *rest]})


def _state(assessment: Assessment) -> RunState:
    """Zero rollouts is a normal state; a trainer that was ready and is not, or rollouts that cannot start, is not."""
    ended = {
        LifecycleStage.COMPLETE: RunState.COMPLETE,
        LifecycleStage.FAILED: RunState.FAILED,
        LifecycleStage.SUSPENDED: RunState.SUSPENDED,
    }
    if assessment.lifecycle.stage in ended:
        return ended[assessment.lifecycle.stage]
    began = assessment.ctx.status.state in (RunState.RUNNING, RunState.DEGRADED)
    if not assessment.trainer_ready:
        return RunState.DEGRADED if began else RunState.PENDING
    failing = any(view.status.failed_starts >= FAILED_STARTS for view in assessment.views)
    # A pool from which nothing more is wanted has no next start that could clear its failures.
    missing = assessment.serving < assessment.scale.desired_replicas
    return RunState.DEGRADED if failing and missing else RunState.RUNNING


def _times(assessment: Assessment) -> dict[str, str | int | None]:
    """Start, last suspension, last resumption, and the running time before that."""
    ctx, stored = assessment.ctx, assessment.ctx.status
    times: dict[str, str | int | None] = {
        "start_time": stored.start_time,
        "last_suspend_time": stored.last_suspend_time,
        "last_resume_time": stored.last_resume_time,
        "active_millis": stored.active_millis,
    }
    runs = assessment.lifecycle.stage is LifecycleStage.RUNS
    if runs and stored.last_resume_time is None and (assessment.accepted.accepted or stored.start_time is not None):
        times["start_time"] = stored.start_time or second(ctx.now)
        times["last_resume_time"] = millisecond(ctx.now)
    if not runs and stored.last_resume_time is not None:
        times["active_millis"] = round(active_s(ctx) * 1000)
        times["last_resume_time"] = None
    if assessment.lifecycle.stage is LifecycleStage.SUSPENDED and stored.state is not RunState.SUSPENDED:
        times["last_suspend_time"] = second(ctx.now)
    return times


def _manager(ctx: ReconcileContext) -> ManagerSummary:
    stored, manager = ctx.status.manager, ctx.facts.manager
    update: dict[str, object] = {"created": managers_made(ctx)}
    if ctx.wants_manager:
        host = f"{names.manager_service(ctx.facts.name)}.{ctx.facts.namespace}"
        update["endpoint"] = f"https://{host}:{ctx.spec.manager.port}"
    if manager is not None:
        step, before = manager.status.step, unix(stored.last_contact_time)
        if before is None or manager.answered_at - before >= CONTACT_EVERY_S:
            update["last_contact_time"] = second(manager.answered_at)
        if stored.step_time is None or step != stored.step:
            update |= {"step": step, "step_time": millisecond(ctx.now)}
        update["weight_version"] = manager.status.weight_version
    return stored.model_copy(update=update)


def _trainer(assessment: Assessment) -> TrainerStatus:
    ctx, job, stored = assessment.ctx, assessment.ctx.facts.trainer, assessment.ctx.status.trainer
    pods = ctx.facts.of_role(Role.TRAINER)
    return TrainerStatus(
        name=names.trainer_name(ctx.facts.name),
        replicas=ctx.spec.trainer.replicas,
        ready=job.ready if job is not None else 0,
        active=job.active if job is not None else 0,
        failed=job.failed if job is not None else 0,
        restarts=max(stored.restarts, job.failed if job is not None else 0),
        disruptions=total(pods, LossCounter.DISRUPTION, stored.disruptions, assessment.trainers_vanished),
    )


def _rollout(assessment: Assessment) -> RolloutStatus:
    ctx, stored = assessment.ctx, assessment.ctx.status.rollout
    pods = [one.pod for one in assessment.fleet]
    newest = ctx.hashes.templates[Role.ROLLOUT]
    lost = bool(assessment.preempted or any(is_loss(pod) for pod in assessment.vanished))
    return RolloutStatus(
        replicas=len(assessment.live),
        ready_replicas=sum(one.pod.ready for one in assessment.live),
        registered_replicas=assessment.serving,
        desired_replicas=assessment.scale.desired_replicas,
        pending_replicas=len(assessment.in_state(PodState.PENDING)),
        draining_replicas=sum(not one.pod.ended for one in assessment.in_state(PodState.PREEMPTED)),
        spot_replicas=len(of_pool(assessment.fleet, Pool.SPOT)),
        on_demand_replicas=len(of_pool(assessment.fleet, Pool.ON_DEMAND)),
        updated_replicas=sum(one.pod.template_hash == newest for one in assessment.live),
        selector=names.selector(ctx.facts.name, Role.ROLLOUT),
        preemptions=total(pods, LossCounter.PREEMPTION, stored.preemptions, assessment.vanished),
        failures=total(pods, LossCounter.FAILURE, stored.failures, assessment.vanished),
        created=rollouts_made(ctx),
        last_preemption_time=second(ctx.now) if lost else stored.last_preemption_time,
        pools=[view.status for view in assessment.views] if ctx.wants_rollouts else [],
    )


MOST: Final = 10
"""Entries kept; events and metrics tell of the others."""

_KINDS: Final = {kind.value for kind in DisruptionKind}


def recent(assessment: Assessment) -> list[Disruption]:
    """Newest last."""
    now, there = assessment.ctx.now, {pod.uid: pod for pod in assessment.ctx.facts.pods}
    known = [_closed(entry, there, now) for entry in assessment.ctx.status.recent_disruptions]
    listed = {entry.pod_uid for entry in known}
    loss_number = [_closed(_entry(pod, now), there, now) for pod in assessment.preempted if pod.uid not in listed]
    at = millisecond(now)
    vanished = [
        Disruption.model_validate(
            {"podName": pod.name, "podUID": uid, "nodeName": pod.node, "noticeTime": at, "deleteTime": at}
            | {"reason": DisruptionKind.DELETED.value}
        )
        for uid, pod in assessment.ctx.state.last_seen.items()
        if pod in assessment.vanished and is_loss(pod) and uid not in listed
    ]
    return [*known, *loss_number, *vanished][-MOST:]


def is_loss(pod: LastSeenPod) -> bool:
    """A pod that vanished was taken, unless it had been found to have failed."""
    loss_number = parse_loss_number(pod.loss_number)
    return loss_number is None or loss_number.counter is LossCounter.PREEMPTION


def _entry(pod: PodFacts, now: float) -> Disruption:
    kind = pod.annotations.get(names.ANNOTATION_NOTICE, "")
    noticed_at = unix(pod.annotations.get(names.ANNOTATION_NOTICED_AT))
    return Disruption.model_validate(
        {
            "podName": pod.name,
            "podUID": pod.uid,
            "nodeName": pod.node,
            "reason": kind if kind in _KINDS else DisruptionKind.UNKNOWN.value,
            "noticeTime": millisecond(now if noticed_at is None else noticed_at),
        }
    )


def _closed(entry: Disruption, there: Mapping[str, PodFacts], now: float) -> Disruption:
    """With the time of its end, once the pod has ended or is gone."""
    pod = there.get(entry.pod_uid)
    if entry.delete_time is not None or (pod is not None and not pod.ended):
        return entry
    noticed_at = unix(entry.notice_time)
    millis = 0 if noticed_at is None else max(0, round((now - noticed_at) * 1000))
    return entry.model_copy(update={"delete_time": millisecond(now), "notice_millis": millis})
