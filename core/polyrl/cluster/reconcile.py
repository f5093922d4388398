"""One reconcile of a job, from observed facts to actions and a status. Repeating it is harmless; nothing else decides.

    managed by another, or being deleted   nothing
    not a job that we understand           the status says why
    not accepted yet                       a dry run is requested
    running                                children, manager, trainer, rollouts: created, drained, scaled, replaced
    suspended                              the trainer ends, then rollouts, then the manager; volumes and counters stay
    ended                                  the same, and after its ttl the job itself is deleted

Each line's policy lies in a module of its own: `acceptance`, `lifecycle`, `scaling`, `fleet`, `reporting`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from polyrl.cluster import names
from polyrl.cluster.acceptance import Acceptance, acceptance
from polyrl.cluster.actions import Action, Annotate, Create, Delete, MakeEngineKeys, ReconcileResult, RenewCertificate
from polyrl.cluster.fleet import singletons
from polyrl.cluster.fleet.certificate import renewal
from polyrl.cluster.fleet.plan import ended_engines, fleet_plan, release_rollouts, rollout_keys, vanished
from polyrl.cluster.fleet.pools import pool_views
from polyrl.cluster.fleet.removal import forced_deletions
from polyrl.cluster.lifecycle import LifecycleStage, delete_after_ttl, lifecycle
from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.exactly_once import LossCounter, loss_number_of, newly_counted
from polyrl.cluster.observation.facts import JobFacts, PodFacts
from polyrl.cluster.observation.rollouts import PodState, rollouts
from polyrl.cluster.reasons import AcceptedReason, ScalingReason
from polyrl.cluster.reporting.assessment import Assessment
from polyrl.cluster.reporting.conditions import stall_due
from polyrl.cluster.reporting.events import condition_events, fleet_events
from polyrl.cluster.reporting.status import job_status, refused
from polyrl.cluster.resources.owner import Settings
from polyrl.cluster.scaling.decision import ScaleDecision, between_steps, scale_decision, stale_at
from polyrl.cluster.state import LastSeenPod, ReconcileState
from polyrl.cluster.timestamps import earliest
from polyrl.manifest.spec import OPERATOR
from polyrl.worker import Role


def reconcile(facts: JobFacts, settings: Settings, state: ReconcileState, now: float) -> ReconcileResult:
    """What to do about one job at `now` (Unix seconds). Never raises for what a cluster or a user may contain.

    The next reconcile is to be given the returned status and state together, once all actions are done, even while the
    status waits to be written; of a reconcile whose actions failed it is given neither.
    """
    if facts.managed_by != OPERATOR or facts.deleting:
        return ReconcileResult((), facts.status, state=state)
    if facts.job is None:
        status = refused(facts.status, facts.generation, facts.refusal, now)
        return ReconcileResult(tuple(condition_events(facts.status, status)), status, state=state)
    assessment = _assess(ReconcileContext(facts, facts.job, settings=settings, state=state, now=now))
    status = job_status(assessment)
    actions, dues = _act(assessment)
    events = condition_events(facts.status, status)
    return ReconcileResult(
        (*actions, *events), status, state=_next_state(assessment, actions), wake_at=earliest(dues, after=now)
    )


def _assess(ctx: ReconcileContext) -> Assessment:
    fleet, now = rollouts(ctx), lifecycle(ctx)
    pods, stored = [one.pod for one in fleet], ctx.status.rollout
    preempted = newly_counted(pods, LossCounter.PREEMPTION, stored.preemptions)
    failed = newly_counted(pods, LossCounter.FAILURE, stored.failures)
    runs = now.stage is LifecycleStage.RUNS
    counts = runs and not ctx.finishing
    accepted = _accepted_before(ctx) if now.ended else acceptance(ctx)
    views = pool_views(ctx, fleet, failed, preempted)
    makes_rollouts = accepted.makes_pods and not singletons.lacks_pods(ctx)
    return Assessment(
        ctx=ctx,
        accepted=accepted,
        lifecycle=now,
        fleet=fleet,
        views=tuple(view if makes_rollouts else replace(view, room=0) for view in views),
        scale=scale_decision(ctx, fleet) if runs else _unchanged(ctx),
        preempted=tuple(preempted),
        failed=tuple(failed),
        vanished=tuple(vanished(ctx, Role.ROLLOUT)) if counts else (),
        trainers_vanished=tuple(vanished(ctx, Role.TRAINER)) if counts else (),
        trainers_disrupted=tuple(singletons.disrupted(ctx)) if counts else (),
    )


def _accepted_before(ctx: ReconcileContext) -> Acceptance:
    """The stored verdict of a job that has ended: it is not checked again."""
    before = ctx.status.condition("Accepted")
    if before is None:
        return Acceptance(True, AcceptedReason.VALID, message="the job is understood", makes_pods=False)
    accepted = {"True": True, "False": False}.get(before.status)
    return Acceptance(accepted, before.reason, message=before.message, makes_pods=False)


def _unchanged(ctx: ReconcileContext) -> ScaleDecision:
    """A job that does not run keeps the number that it last had, so that it goes on from there."""
    desired = ctx.status.rollout.desired_replicas
    return ScaleDecision(
        desired, ctx.status.scaling, active=False, reason=ScalingReason.IDLE, message="the job does not run"
    )


def _act(assessment: Assessment) -> tuple[list[Action], list[float | None]]:
    """Actions in order, and moments at which time alone may ask for more."""
    forced, forced_due = forced_deletions(assessment.ctx)
    actions, dues = _run(assessment) if assessment.lifecycle.stage is LifecycleStage.RUNS else _stop(assessment)
    asked = [] if assessment.accepted.dry_run is None else [assessment.accepted.dry_run]
    return [*asked, *actions, *forced], [*dues, forced_due, assessment.accepted.due, assessment.lifecycle.due]


def _run(assessment: Assessment) -> tuple[list[Action], list[float | None]]:
    ctx, accepted = assessment.ctx, assessment.accepted
    if not accepted.makes_pods and ctx.status.start_time is None:
        return [], []
    manager_actions, manager_due = singletons.manager(ctx) if ctx.wants_manager else ([], None)
    # While the run ends, rollouts leave by themselves, and none is replaced.
    desired = 0 if ctx.finishing else assessment.scale.desired_replicas
    plan = fleet_plan(
        ctx,
        assessment.fleet,
        desired=desired,
        views=assessment.views,
        boundary=between_steps(ctx) if accepted.makes_pods and not singletons.lacks_pods(ctx) else None,
        missing=assessment.vanished,
    )
    renewals, renewal_due = renewal(ctx)
    actions: list[Action] = [
        *singletons.trainer(ctx, assessment.lifecycle),
        *singletons.trainer_numbers(ctx, assessment.trainers_vanished),
        *plan.actions,
        *rollout_keys(ctx),
        *renewals,
        *ended_engines(ctx),
    ]
    if accepted.makes_pods:
        manager_actions = [*singletons.children(ctx), *manager_actions]
    else:
        # The API server refused these pods, or has not agreed to them yet. A trainer that runs needs its manager.
        actions = _without_new(actions)
        manager_actions = manager_actions if singletons.trainer_lives(ctx) else _without_new(manager_actions)
    dues = [manager_due, renewal_due, plan.due, stall_due(assessment), stale_at(ctx)]
    return [*manager_actions, *actions, *fleet_events(assessment, plan)], dues


def _without_new(actions: Iterable[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, Create)]


_WHY_STOPPED: Final = {
    LifecycleStage.SUSPENDED: "the job is suspended",
    LifecycleStage.STUCK: "the trainer cannot go on",
}


def _stop(assessment: Assessment) -> tuple[list[Action], list[float | None]]:
    ctx, now = assessment.ctx, assessment.lifecycle
    why = _WHY_STOPPED.get(now.stage, "the job has ended")
    deletions, due = delete_after_ttl(ctx, now) if now.ended else ([], None)
    # Each goes once what needs it has ended: rollouts after the trainer, the manager after both.
    leaving = [] if singletons.trainer_lives(ctx) else [(one, why) for one in assessment.fleet]
    rollouts_released = release_rollouts(ctx, leaving)
    managers_released = singletons.stop_manager(ctx, why)
    return [*singletons.trainer(ctx, now), *rollouts_released, *managers_released, *deletions], [due]


def _next_state(assessment: Assessment, actions: Iterable[Action]) -> ReconcileState:
    ctx, state = assessment.ctx, assessment.accepted.state or assessment.ctx.state
    pods = ctx.facts.pods
    uids, bound = {pod.uid for pod in pods}, {pod.node for pod in pods if pod.node}
    listed = {one.pod.uid for one in assessment.fleet if one.engine is not None}
    deleted = {action.uid for action in actions if isinstance(action, Delete)}
    deleted |= {one.pod.uid for one in assessment.in_state(PodState.DELETING)}
    enough = len(assessment.live) >= assessment.scale.desired_replicas
    numbers = {uid: pod.loss_number for uid, pod in state.last_seen.items()}
    for action in actions:
        if isinstance(action, Annotate) and names.ANNOTATION_COUNTED in action.annotations:
            numbers[action.uid] = action.annotations[names.ANNOTATION_COUNTED]
    return replace(
        state,
        hashes=ctx.hashes,
        began_at=ctx.now if state.began_at is None else state.began_at,
        # What pods cannot do without is asked for in this very reconcile, unless it is wanted no longer.
        refusal=None if enough or assessment.refused_child else state.refusal,
        last_seen={pod.uid: _last_seen(assessment, pod, deleted, loss_number=numbers.get(pod.uid, "")) for pod in pods},
        nodes=frozenset(ctx.facts.nodes) | (state.nodes & bound),
        absent_since={node: state.absent_since.get(node, ctx.now) for node in bound - ctx.facts.nodes.keys()},
        silent_since={one.pod.uid: one.silent_since for one in assessment.fleet if one.silent_since is not None},
        registered=(state.registered & uids) | listed,
        renewal_tried_at=ctx.now
        if any(isinstance(action, RenewCertificate) for action in actions)
        else state.renewal_tried_at,
        drains_confirmed=state.drains_confirmed & uids,
        keys_made=(state.keys_made & uids)
        | {uid for action in actions if isinstance(action, MakeEngineKeys) for _, uid in action.pods},
    )


def _last_seen(assessment: Assessment, pod: PodFacts, deleted: set[str], loss_number: str) -> LastSeenPod:
    """A pod that had no node yet is no loss; one that we delete in this very reconcile, or deleted with a suspension of
    the trainer, is none either."""
    stops = assessment.lifecycle.stage is not LifecycleStage.RUNS
    ours = stops or (pod.role is Role.TRAINER and singletons.is_of_before(assessment.ctx, pod))
    known = ours or pod.uid in deleted or loss_number_of(pod) is not None
    return LastSeenPod(
        name=pod.name,
        role=pod.role,
        pool=pod.pool,
        node=pod.node,
        settled=known or (not loss_number and (pod.ended or pod.scheduled_at is None)),
        runs_since=pod.runs_since,
        loss_number=loss_number,
    )
