"""One look at a job, from facts to a decision. Repeating it is harmless; what it decides depends on nothing else.

not ours, or being deleted        nothing
not a job that we understand      the status says why
not accepted yet                  a dry run is asked for
runs                              children, drains, manager, trainer, rollouts; nothing of use waits for another
suspended                         the trainer stops, rollouts go, then the manager; volumes and counters stay
ended                             the same, and after its ttl the job itself goes
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from polyrl.cluster import names
from polyrl.cluster.acceptance import Acceptance, acceptance
from polyrl.cluster.actions import Action, Annotate, Create, Delete, ReconcileResult
from polyrl.cluster.autoscaling.scale_decision import ScaleDecision, observe_step, scale_decision, stale_at
from polyrl.cluster.fleet.plan import FleetPlan, fleet_plan, release_rollouts, vanished
from polyrl.cluster.fleet.pools import pool_views
from polyrl.cluster.fleet.removal import forced_deletions
from polyrl.cluster.fleet.singletons import children, disrupted, manager, stop_manager, trainer, trainer_numbers
from polyrl.cluster.lifecycle import Lifecycle, LifecycleStage, delete_after_ttl, lifecycle
from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.exactly_once import LossCounter, loss_number_of, newly_counted
from polyrl.cluster.observation.facts import JobFacts, PodFacts
from polyrl.cluster.observation.rollouts import PodState, rollouts
from polyrl.cluster.reporting.assessment import Assessment
from polyrl.cluster.reporting.conditions import stall_due
from polyrl.cluster.reporting.cost import runs_since
from polyrl.cluster.reporting.events import condition_events, fleet_events
from polyrl.cluster.reporting.status import refused, status_of
from polyrl.cluster.resources.owner import Settings
from polyrl.cluster.state import LastSeenPod, ReconcileState
from polyrl.manifest.spec import OPERATOR
from polyrl.worker import Role


def reconcile(facts: JobFacts, settings: Settings, state: ReconcileState, now: float) -> ReconcileResult:
    """What to do about one job at `now` (Unix seconds). Never raises for what a cluster or a user may contain.

    The next look is to be shown the returned status and memory together, once all actions are done, even while the
    status waits to be written; a look whose actions failed leaves neither.
    """
    if facts.managed_by != OPERATOR or facts.deleting:
        return ReconcileResult((), facts.status, state)
    if facts.job is None:
        status = refused(facts.status, facts.generation, facts.refusal, now)
        return ReconcileResult(tuple(condition_events(facts.status, status)), status, state)
    assessment = _assess(ReconcileContext(facts, facts.job, settings, state, now))
    status = status_of(assessment)
    actions, dues = _act(assessment)
    due = min((due for due in dues if due is not None and due > now), default=None)
    return ReconcileResult(
        (*actions, *condition_events(facts.status, status)), status, _next_state(assessment, actions), due
    )


def _assess(ctx: ReconcileContext) -> Assessment:
    fleet, step, stage = rollouts(ctx), observe_step(ctx), lifecycle(ctx)
    pods, stored = [one.pod for one in fleet], ctx.status.rollout
    preempted = newly_counted(pods, LossCounter.PREEMPTION, stored.preemptions)
    failed = newly_counted(pods, LossCounter.FAILURE, stored.failures)
    runs = stage.stage is LifecycleStage.RUNS and not ctx.finishing
    accepted = _settled(ctx) if stage.ended else acceptance(ctx)
    views = pool_views(ctx, fleet, failed, preempted)
    return Assessment(
        ctx=ctx,
        accepted=accepted,
        lifecycle=stage,
        fleet=fleet,
        views=tuple(view if accepted.makes_pods else replace(view, room=0) for view in views),
        scale=scale_decision(ctx, fleet, step) if stage.stage is LifecycleStage.RUNS else _at_rest(ctx),
        step=step,
        preempted=tuple(preempted),
        failed=tuple(failed),
        vanished=tuple(vanished(ctx, Role.ROLLOUT)) if runs else (),
        trainers_vanished=tuple(vanished(ctx, Role.TRAINER)) if runs else (),
        trainers_disrupted=tuple(disrupted(ctx)) if runs else (),
    )


def _settled(ctx: ReconcileContext) -> Acceptance:
    """An ended job is not judged again."""
    before = next((known for known in ctx.status.conditions if known.type == "Accepted"), None)
    if before is None:
        return Acceptance(True, "Valid", "the job is understood", makes_pods=False)
    verdict = {"True": True, "False": False}.get(before.status)
    return Acceptance(verdict, before.reason, before.message, makes_pods=False)


def _at_rest(ctx: ReconcileContext) -> ScaleDecision:
    """A job that does not run wishes for what it last had, so that it goes on from there."""
    return ScaleDecision(
        ctx.status.rollout.desired_replicas, ctx.status.scaling, (), False, "Idle", "the job does not run"
    )


def _act(assessment: Assessment) -> tuple[list[Action], list[float | None]]:
    """Actions in order, and moments at which time alone may ask for more."""
    removed = forced_deletions(assessment.ctx)
    dues: list[float | None] = [removed.due, assessment.accepted.due, assessment.lifecycle.due]
    if assessment.lifecycle.stage is LifecycleStage.RUNS:
        actions, more = _run(assessment)
    else:
        actions, more = _rest(assessment)
    return [*actions, *removed.actions], [*dues, *more]


def _run(assessment: Assessment) -> tuple[list[Action], list[float | None]]:
    ctx, accepted = assessment.ctx, assessment.accepted
    asks: list[Action] = [accepted.dry_run] if accepted.dry_run is not None else []
    if not accepted.makes_pods and ctx.status.start_time is None:
        return asks, []
    fixed = list(children(ctx)) if accepted.makes_pods else []
    plan = _fleet(assessment)
    single, manager_due = manager(ctx) if ctx.wants_manager else ([], None)
    singles = [*single, *trainer(ctx, assessment.lifecycle), *trainer_numbers(ctx, assessment.trainers_vanished)]
    actions = [*asks, *fixed, *_allowed(singles, accepted), *_allowed(plan.actions, accepted)]
    dues = [manager_due, plan.due, stall_due(assessment), stale_at(ctx)]
    return [*actions, *fleet_events(assessment, plan)], dues


def _fleet(assessment: Assessment) -> FleetPlan:
    """While the run says goodbye, rollouts leave by themselves; otherwise the fleet is kept at the wished number."""
    return fleet_plan(
        assessment.ctx,
        assessment.fleet,
        0 if assessment.ctx.finishing else assessment.scale.desired_replicas,
        assessment.views,
        assessment.step.boundary,
        assessment.vanished,
    )


def _allowed(actions: Iterable[Action], accepted: Acceptance) -> list[Action]:
    """Without pods that the API server refused, or has not agreed to yet."""
    return [action for action in actions if accepted.makes_pods or not isinstance(action, Create)]


def _rest(assessment: Assessment) -> tuple[list[Action], list[float | None]]:
    ctx, now = assessment.ctx, assessment.lifecycle
    why = "the job has ended" if now.ended else "the job is suspended"
    actions: list[Action] = list(trainer(ctx, now))
    actions += release_rollouts(ctx, [(one, why) for one in assessment.fleet])
    actions += stop_manager(ctx, why)
    vanished, due = delete_after_ttl(ctx, now) if now.ended else ([], None)
    return [*actions, *vanished], [due]


def _next_state(assessment: Assessment, actions: Iterable[Action]) -> ReconcileState:
    ctx, state = assessment.ctx, assessment.accepted.state or assessment.ctx.state
    uids, bound = {pod.uid for pod in ctx.facts.pods}, {pod.node for pod in ctx.facts.pods if pod.node}
    listed = {one.pod.uid for one in assessment.fleet if one.engine is not None}
    silent = {one.pod.uid: one.silent_since for one in assessment.fleet if one.silent_since is not None}
    ours = {action.uid for action in actions if isinstance(action, Delete)}
    ours |= {one.pod.uid for one in assessment.in_state(PodState.DELETING)}
    notes = {action.uid: action.annotations for action in actions if isinstance(action, Annotate)}
    marks = {uid: seen.loss_number for uid, seen in state.last_seen.items() if seen.loss_number}
    marks |= {uid: notes[uid][names.ANNOTATION_COUNTED] for uid in notes if names.ANNOTATION_COUNTED in notes[uid]}
    return replace(
        state,
        hashes=ctx.hashes,
        began_at=ctx.now if state.began_at is None else state.began_at,
        refusal=None if len(assessment.live) >= assessment.scale.desired_replicas else state.refusal,
        recommendations=assessment.scale.window,
        watch=assessment.step.watch,
        last_seen={pod.uid: _seen(pod, ours, marks.get(pod.uid, ""), assessment.lifecycle) for pod in ctx.facts.pods},
        nodes=frozenset(ctx.facts.nodes) | (state.nodes & bound),
        absent_since={node: state.absent_since.get(node, ctx.now) for node in bound - ctx.facts.nodes.keys()},
        silent_since=silent,
        registered=(state.registered & uids) | listed,
        drains_confirmed=state.drains_confirmed & uids,
    )


def _seen(pod: PodFacts, ours: set[str], loss_number: str, now: Lifecycle) -> LastSeenPod:
    """A pod that had no node yet was not taken from anybody; one that we delete in this very look neither."""
    known = pod.uid in ours or loss_number_of(pod) is not None or now.stage is not LifecycleStage.RUNS
    settled = known or (not loss_number and (pod.ended or pod.scheduled_at is None))
    return LastSeenPod(pod.name, pod.role, pod.pool, pod.node, settled, runs_since(pod), loss_number)
