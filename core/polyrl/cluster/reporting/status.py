"""The status to store after a reconcile: whole numbers, bounded lists, counters and a cost that only grow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from polyrl.cluster import names
from polyrl.cluster.lifecycle import LifecycleStage, active_s
from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.disruption import disruption_kind
from polyrl.cluster.observation.exactly_once import LossCounter, parse_loss_number, total
from polyrl.cluster.observation.facts import PodFacts
from polyrl.cluster.observation.rollouts import PodState, of_pool
from polyrl.cluster.reasons import AcceptedReason
from polyrl.cluster.reporting.assessment import Assessment
from polyrl.cluster.reporting.conditions import ConditionDraft, conditions, to_condition
from polyrl.cluster.state import LastSeenPod
from polyrl.cluster.timestamps import millisecond, second, unix
from polyrl.history.cost import price_per_hour, spent
from polyrl.manifest.status import (
    Cost,
    Disruption,
    DisruptionKind,
    JobStatus,
    ManagerSummary,
    RolloutStatus,
    RunState,
    TrainerStatus,
)
from polyrl.sample import Pool
from polyrl.worker import FAILED_STARTS_LIMIT, Role

CONTACT_EVERY_S: Final = 60.0
"""lastContactTime is moved no more often: hearing nothing new from the manager is no reason to write."""

_AT_REST: Final = {
    LifecycleStage.COMPLETE: RunState.COMPLETE,
    LifecycleStage.FAILED: RunState.FAILED,
    LifecycleStage.SUSPENDED: RunState.SUSPENDED,
    LifecycleStage.STUCK: RunState.PENDING,
}

MAX_DISRUPTIONS: Final = 10
"""Entries of recentDisruptions; events and metrics show the others."""


def job_status(assessment: Assessment) -> JobStatus:
    """Recomputes the status and keeps the fields that cannot be recomputed."""
    ctx = assessment.ctx
    update: dict[str, object] = {
        "observed_generation": ctx.facts.generation,
        "state": _state(assessment),
        "conditions": conditions(assessment),
        "run_id": ctx.facts.uid,
        "manager": _manager(ctx),
        "trainer": _trainer(assessment),
        "rollout": _rollout(assessment),
        "scaling": assessment.scale.scaling,
        "recent_disruptions": recent_disruptions(assessment),
        "failure": assessment.lifecycle.failure,
    }
    if ctx.status.completion_time is None:
        update["cost"] = cost(ctx, closing=assessment.lifecycle.ended)
        if assessment.lifecycle.ended_at:
            update["completion_time"] = second(assessment.lifecycle.ended_at)
    return ctx.status.model_copy(update=update | _times(assessment))


def refused(stored: JobStatus, generation: int, sentence: str, now: float) -> JobStatus:
    """Status of an object that this version does not understand: Accepted=False, and all else as stored."""
    drafted = ConditionDraft("False", AcceptedReason.INVALID, message=sentence)
    accepted = to_condition("Accepted", drafted, stored.condition("Accepted"), generation, now)
    rest = [known for known in stored.conditions if known.type != "Accepted"]
    return stored.model_copy(update={"observed_generation": generation, "conditions": [accepted, *rest]})


def _state(assessment: Assessment) -> RunState:
    """Zero rollouts is a normal state; a trainer that was ready and is not, or rollouts that cannot start, is not."""
    if assessment.lifecycle.stage in _AT_REST:
        return _AT_REST[assessment.lifecycle.stage]
    began = assessment.ctx.status.state in (RunState.RUNNING, RunState.DEGRADED)
    if not assessment.trainer_ready:
        return RunState.DEGRADED if began else RunState.PENDING
    failing = any(view.status.failed_starts >= FAILED_STARTS_LIMIT for view in assessment.views)
    # A pool from which nothing more is wanted has no next start that could clear its failures.
    missing = assessment.serving < assessment.scale.desired_replicas
    return RunState.DEGRADED if failing and missing else RunState.RUNNING


def _times(assessment: Assessment) -> dict[str, str | int | None]:
    """What changes of the start, the last suspension and resumption, and the running time before that."""
    ctx, stored = assessment.ctx, assessment.ctx.status
    times: dict[str, str | int | None] = {}
    runs = assessment.lifecycle.stage is LifecycleStage.RUNS
    if runs and stored.last_resume_time is None and (assessment.accepted.verdict or stored.start_time is not None):
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
    update: dict[str, object] = {"created": ctx.highest_ordinal(Role.MANAGER)}
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
    ready, active, failed = (job.ready, job.active, job.failed) if job is not None else (0, 0, 0)
    return TrainerStatus(
        name=names.trainer_name(ctx.facts.name),
        replicas=ctx.spec.trainer.replicas,
        ready=ready,
        active=active,
        failed=failed,
        restarts=max(stored.restarts, failed),
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
        created=ctx.highest_ordinal(Role.ROLLOUT),
        last_preemption_time=second(ctx.now) if lost else stored.last_preemption_time,
        pools=[view.status for view in assessment.views] if ctx.wants_rollouts else [],
    )


def recent_disruptions(assessment: Assessment) -> list[Disruption]:
    """The last few rollouts that were taken away, newest last: each listed once, and closed when its pod is gone."""
    ctx = assessment.ctx
    entries, listed = list(ctx.status.recent_disruptions), {entry.pod_uid for entry in ctx.status.recent_disruptions}
    for pod in assessment.preempted:
        if pod.uid not in listed:
            noticed_at = unix(pod.annotations.get(names.ANNOTATION_NOTICED_AT))
            reason = disruption_kind(pod) or DisruptionKind.UNKNOWN
            entries.append(_disruption(pod, pod.uid, reason, ctx.now if noticed_at is None else noticed_at))
    for uid, vanished in ctx.state.last_seen.items():
        if vanished in assessment.vanished and is_loss(vanished) and uid not in listed:
            entries.append(_disruption(vanished, uid, DisruptionKind.DELETED, ctx.now))
    there = {pod.uid: pod for pod in ctx.facts.pods}
    return [_closed(entry, there, ctx.now) for entry in entries][-MAX_DISRUPTIONS:]


def is_loss(pod: LastSeenPod) -> bool:
    """A pod that vanished was taken, unless it had been found to have failed."""
    given = parse_loss_number(pod.loss_number)
    return given is None or given.counter is LossCounter.PREEMPTION


def _disruption(pod: PodFacts | LastSeenPod, uid: str, reason: DisruptionKind, noticed_at: float) -> Disruption:
    fields = {"podName": pod.name, "podUID": uid, "nodeName": pod.node, "reason": reason}
    return Disruption.model_validate(fields | {"noticeTime": millisecond(noticed_at)})


def _closed(entry: Disruption, there: Mapping[str, PodFacts], now: float) -> Disruption:
    """The entry with the time of its end, once the pod has ended or is gone."""
    pod = there.get(entry.pod_uid)
    if entry.delete_time is not None or (pod is not None and not pod.ended):
        return entry
    noticed_at = unix(entry.notice_time)
    millis = 0 if noticed_at is None else max(0, round((now - noticed_at) * 1000))
    return entry.model_copy(update={"delete_time": millisecond(now), "notice_millis": millis})


CHARGE_EVERY_S: Final = 60.0
MICROS: Final = 1e6
"""Millionths, in which a status counts money."""
SHARES: Final = {Pool.RESERVED: "reserved_micros", Pool.SPOT: "spot_micros", Pool.ON_DEMAND: "on_demand_micros"}
"""A status' fields of what each pool has cost."""


def cost(ctx: ReconcileContext, *, closing: bool) -> Cost:
    """Seconds that the job's pods held nodes, at the manifest's prices, in millionths of its currency. Charged when a
    pod ends, else once a minute, so that money alone does not change the status at every reconcile; when the operator
    was down, pods that are still there are charged as it comes back. `closing`: the job ended, all is charged now."""
    stored = ctx.status.cost
    since = unix(stored.accounted_time)
    if not any(price_per_hour(ctx.spec.pricing, pool) for pool in SHARES):
        return stored
    if since is not None and ctx.now - since < CHARGE_EVERY_S and not closing and not _ended_since(ctx):
        return stored
    amounts = spent(ctx.spec.pricing, _seconds(ctx, ctx.now if since is None else since))
    update: dict[str, object] = {
        SHARES[pool]: getattr(stored, SHARES[pool]) + round(amount * MICROS) for pool, amount in amounts.items()
    }
    return stored.model_copy(update=update | {"accounted_time": millisecond(ctx.now)})


def _ended_since(ctx: ReconcileContext) -> bool:
    there = {pod.uid for pod in ctx.facts.pods if not pod.ended}
    return any(pod.runs_since is not None and uid not in there for uid, pod in ctx.state.last_seen.items())


def _seconds(ctx: ReconcileContext, since: float) -> dict[Pool, float]:
    """Seconds that pods held nodes since the last charge, the trainer's as reserved ones; a pod that ended meanwhile is
    charged until now."""
    started = {uid: (pod.role, pod.pool, pod.runs_since) for uid, pod in ctx.state.last_seen.items()}
    started |= {pod.uid: (pod.role, pod.pool, pod.runs_since) for pod in ctx.facts.pods if not pod.ended}
    total = dict.fromkeys(SHARES, 0.0)
    for role, pool, start in started.values():
        if start is None or role is Role.MANAGER:
            continue
        share = Pool.ON_DEMAND if pool is Pool.ON_DEMAND else Pool.SPOT
        total[Pool.RESERVED if role is Role.TRAINER else share] += max(0.0, ctx.now - max(since, start))
    return total
