"""One look at a job, from facts to a decision. Repeating it is harmless; what it decides depends on nothing else.

    not ours, or being deleted        nothing
    not a job that we understand      the status says why
    not accepted yet                  a dry run is asked for
    runs                              children, drains, manager, trainer, rollouts; nothing of use waits for another
    suspended                         the trainer stops, rollouts go, then the manager; volumes and counters stay
    ended                             the same, and after its ttl the job itself goes

Refuses to hold: any policy of its own. Read next: `acceptance`, `lifecycle`, `singles`, `fleet_plan`, `status_of`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from polyrl.cluster import names
from polyrl.cluster.acceptance import Acceptance, acceptance
from polyrl.cluster.actions import Action, Annotate, Create, Decision, Delete
from polyrl.cluster.autoscaling.scale_decision import Wish, stale_at, wish
from polyrl.cluster.autoscaling.steps import step_news
from polyrl.cluster.fleet.plan import Plan, fleet_plan, let_go, vanished
from polyrl.cluster.fleet.pools import pool_views
from polyrl.cluster.fleet.removal import forced
from polyrl.cluster.fleet.singletons import children, dismiss, disrupted, manager, trainer, trainer_numbers
from polyrl.cluster.lifecycle import Life, Stage, farewell, life
from polyrl.cluster.observation.context import Look
from polyrl.cluster.observation.exactly_once import Tally, counted, newly_counted
from polyrl.cluster.observation.facts import JobFacts, PodFacts
from polyrl.cluster.observation.rollouts import Standing, rollouts
from polyrl.cluster.reporting.announce import fleet_news, flips
from polyrl.cluster.reporting.assessment import Judged
from polyrl.cluster.reporting.conditions import stall_due
from polyrl.cluster.reporting.cost import runs_since
from polyrl.cluster.reporting.status import refused, status_of
from polyrl.cluster.settings import Settings
from polyrl.cluster.state import Memory, SeenPod
from polyrl.manifest.spec import OPERATOR
from polyrl.worker import Role


def reconcile(facts: JobFacts, settings: Settings, memory: Memory, now: float) -> Decision:
    """What to do about one job at `now` (Unix seconds). Never raises for what a cluster or a user may contain.

    The next look is to be shown the returned status and memory together, once all actions are done, even while the
    status waits to be written; a look whose actions failed leaves neither.
    """
    if facts.managed_by != OPERATOR or facts.deleting:
        return Decision((), facts.status, memory)
    if facts.job is None:
        status = refused(facts.status, facts.generation, facts.refusal, now)
        return Decision(tuple(flips(facts.status, status)), status, memory)
    judged = _judge(Look(facts, facts.job, settings, memory, now))
    status = status_of(judged)
    actions, dues = _act(judged)
    due = min((due for due in dues if due is not None and due > now), default=None)
    return Decision((*actions, *flips(facts.status, status)), status, _remembered(judged, actions), due)


def _judge(look: Look) -> Judged:
    fleet, news, stage = rollouts(look), step_news(look), life(look)
    pods, stored = [one.pod for one in fleet], look.status.rollout
    taken = newly_counted(pods, Tally.PREEMPTION, stored.preemptions)
    failed = newly_counted(pods, Tally.FAILURE, stored.failures)
    runs = stage.stage is Stage.RUNS and not look.finishing
    accepted = _settled(look) if stage.ended else acceptance(look)
    views = pool_views(look, fleet, failed, taken)
    return Judged(
        look=look,
        accepted=accepted,
        life=stage,
        fleet=fleet,
        views=tuple(view if accepted.makes_pods else replace(view, room=0) for view in views),
        wish=wish(look, fleet, news) if stage.stage is Stage.RUNS else _at_rest(look),
        news=news,
        taken=tuple(taken),
        failed=tuple(failed),
        vanished=tuple(vanished(look, Role.ROLLOUT)) if runs else (),
        trainers_vanished=tuple(vanished(look, Role.TRAINER)) if runs else (),
        trainers_disrupted=tuple(disrupted(look)) if runs else (),
    )


def _settled(look: Look) -> Acceptance:
    """An ended job is not judged again."""
    before = next((known for known in look.status.conditions if known.type == "Accepted"), None)
    if before is None:
        return Acceptance(True, "Valid", "the job is understood", makes_pods=False)
    verdict = {"True": True, "False": False}.get(before.status)
    return Acceptance(verdict, before.reason, before.message, makes_pods=False)


def _at_rest(look: Look) -> Wish:
    """A job that does not run wishes for what it last had, so that it goes on from there."""
    return Wish(look.status.rollout.desired_replicas, look.status.scaling, (), False, "Idle", "the job does not run")


def _act(judged: Judged) -> tuple[list[Action], list[float | None]]:
    """Actions in order, and moments at which time alone may ask for more."""
    removed = forced(judged.look)
    dues: list[float | None] = [removed.due, judged.accepted.due, judged.life.due]
    if judged.life.stage is Stage.RUNS:
        actions, more = _run(judged)
    else:
        actions, more = _rest(judged)
    return [*actions, *removed.actions], [*dues, *more]


def _run(judged: Judged) -> tuple[list[Action], list[float | None]]:
    look, accepted = judged.look, judged.accepted
    asks: list[Action] = [accepted.ask] if accepted.ask is not None else []
    if not accepted.makes_pods and look.status.start_time is None:
        return asks, []
    fixed = list(children(look)) if accepted.makes_pods else []
    plan = _fleet(judged)
    single, manager_due = manager(look) if look.wants_manager else ([], None)
    singles = [*single, *trainer(look, judged.life), *trainer_numbers(look, judged.trainers_vanished)]
    actions = [*asks, *fixed, *_allowed(singles, accepted), *_allowed(plan.actions, accepted)]
    dues = [manager_due, plan.due, stall_due(judged), stale_at(look)]
    return [*actions, *fleet_news(judged, plan)], dues


def _fleet(judged: Judged) -> Plan:
    """While the run says goodbye, rollouts leave by themselves; otherwise the fleet is kept at the wished number."""
    return fleet_plan(
        judged.look,
        judged.fleet,
        0 if judged.look.finishing else judged.wish.wished,
        judged.views,
        judged.news.boundary,
        judged.vanished,
    )


def _allowed(actions: Iterable[Action], accepted: Acceptance) -> list[Action]:
    """Without pods that the API server refused, or has not agreed to yet."""
    return [action for action in actions if accepted.makes_pods or not isinstance(action, Create)]


def _rest(judged: Judged) -> tuple[list[Action], list[float | None]]:
    look, now = judged.look, judged.life
    why = "the job has ended" if now.ended else "the job is suspended"
    actions: list[Action] = list(trainer(look, now))
    actions += let_go(look, [(one, why) for one in judged.fleet])
    actions += dismiss(look, why)
    gone, due = farewell(look, now) if now.ended else ([], None)
    return [*actions, *gone], [due]


def _remembered(judged: Judged, actions: Iterable[Action]) -> Memory:
    look, memory = judged.look, judged.accepted.memory or judged.look.memory
    uids, bound = {pod.uid for pod in look.facts.pods}, {pod.node for pod in look.facts.pods if pod.node}
    listed = {one.pod.uid for one in judged.fleet if one.engine is not None}
    silent = {one.pod.uid: one.silent_since for one in judged.fleet if one.silent_since is not None}
    ours = {action.uid for action in actions if isinstance(action, Delete)}
    ours |= {one.pod.uid for one in judged.standing(Standing.RELEASED)}
    notes = {action.uid: action.annotations for action in actions if isinstance(action, Annotate)}
    marks = {uid: seen.mark for uid, seen in memory.seen.items() if seen.mark}
    marks |= {uid: notes[uid][names.ANNOTATION_COUNTED] for uid in notes if names.ANNOTATION_COUNTED in notes[uid]}
    return replace(
        memory,
        written=look.written,
        began_at=look.now if memory.began_at is None else memory.began_at,
        refusal=None if len(judged.live) >= judged.wish.wished else memory.refusal,
        recommendations=judged.wish.window,
        watch=judged.news.watch,
        seen={pod.uid: _seen(pod, ours, marks.get(pod.uid, ""), judged.life) for pod in look.facts.pods},
        nodes=frozenset(look.facts.nodes) | (memory.nodes & bound),
        absent_since={node: memory.absent_since.get(node, look.now) for node in bound - look.facts.nodes.keys()},
        silent_since=silent,
        registered=(memory.registered & uids) | listed,
        drains_told=memory.drains_told & uids,
    )


def _seen(pod: PodFacts, ours: set[str], mark: str, now: Life) -> SeenPod:
    """A pod that had no node yet was not taken from anybody; one that we delete in this very look neither."""
    known = pod.uid in ours or counted(pod) is not None or now.stage is not Stage.RUNS
    settled = known or (not mark and (pod.ended or pod.scheduled_at is None))
    return SeenPod(pod.name, pod.role, pod.pool, pod.node, settled, runs_since(pod), mark)
