"""What to do about the rollouts of a running job, most urgent first.

    1 drain what the cluster takes: its engine's work moves while it still runs
    2 number what was lost, so that it is counted once
    3 make what is missing, replacements of the lost in this very pass
    4 release what is too many, stands in no longer, or is of an old template
    5 delete what is lost and counted

One reconcile creates and releases so many at most; the rest follows in the next ones, because what has happened
meanwhile, a notice above all, is seen only then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from polyrl.cluster import names
from polyrl.cluster.actions import Action, Annotate, Create, Delete, DrainEngine, MakeEngineKeys
from polyrl.cluster.fleet.capacity_split import CapacitySplit, base, capacity_split
from polyrl.cluster.fleet.pools import PoolView
from polyrl.cluster.fleet.removal import release
from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.exactly_once import LossCounter, LossNumber, assign_numbers, total
from polyrl.cluster.observation.facts import PodPhase
from polyrl.cluster.observation.rollouts import PodState, RolloutPod, next_due, of_pool
from polyrl.cluster.resources.workers import rollout_pod
from polyrl.cluster.scaling.prices import affordable_on_demand
from polyrl.cluster.state import LastSeenPod
from polyrl.cluster.timestamps import earliest, millisecond
from polyrl.manifest.status import DisruptionKind
from polyrl.sample import Pool
from polyrl.status import EngineState
from polyrl.worker import Role

OVERSTAY_S: Final = 10.0
"""A drained pod that lives so long beyond its deadline is deleted by us, so that nothing half-gone stays."""

DRAIN_REPEAT_S: Final = 2.0
"""A drain that the manager did not confirm is repeated after so long."""

POD_UNSEEN_S: Final = 60.0
"""Since an operator's first reconcile of a job: by then it has seen each pod that the operator before it made."""

MAX_CREATIONS: Final = 50
"""Pods made in one reconcile: under a second of requests even on a server that takes 100 ms for each."""

MAX_RELEASES: Final = 25
"""Pods released in one reconcile: two requests each."""

CONTINUE_AFTER_S: Final = 0.05
"""Until the reconcile that goes on with the rest, should no watch have shown what this one did."""


@dataclass(frozen=True)
class FleetPlan:
    """Actions in order, and when to reconcile again."""

    actions: tuple[Action, ...]
    made: dict[Pool, int]
    """Pods asked for."""
    standing_in: int
    """On-demand pods among them that stand in for spot."""
    released: Counter[str]
    """Number of pods released, by reason."""
    due: float | None = None


def fleet_plan(
    ctx: ReconcileContext,
    fleet: Sequence[RolloutPod],
    *,
    desired: int,
    views: Sequence[PoolView],
    boundary: bool | None,
    missing: Sequence[LastSeenPod],
) -> FleetPlan:
    """For a fleet of `desired`, at a `boundary` between two steps or not; None: nothing makes way for a template that
    nobody has agreed to. `missing` rollouts of the last reconcile are counted in this one without being numbered."""
    # A spot pod that got its node beside stand-ins costs from then on, and not when it serves.
    placed = sum(one.live and one.pod.scheduled_at is not None for one in fleet)
    max_on_demand = affordable_on_demand(ctx.spec, max(desired, placed))
    whole = capacity_split(fleet, desired, ctx.spec.rollout, views, ctx.now, max_on_demand)
    split = limited(whole)
    every = _leaving(ctx, fleet, desired, views, split, boundary)
    leaving = every[:MAX_RELEASES]
    pending_drains, retry_due = unconfirmed_drains(ctx, fleet)
    deletions, stay_due = _deletions(ctx, fleet)
    # Who makes way goes first: an operator that died after the others had come left more than there may be.
    actions: list[Action] = [*pending_drains, *_numbers(ctx, fleet, missing), *release_rollouts(ctx, leaving)]
    actions += _creations(ctx, fleet, split)
    dues = [split.due, retry_due, stay_due, next_due(fleet, ctx), *(view.due for view in views)]
    dues.append(ctx.now + CONTINUE_AFTER_S if split != whole or leaving != every else None)
    return FleetPlan(
        actions=(*actions, *deletions),
        made={Pool.SPOT: split.spot, Pool.ON_DEMAND: split.on_demand},
        standing_in=split.standing_in,
        released=Counter(why for _, why in leaving),
        due=earliest(dues, after=ctx.now),
    )


def rollout_keys(ctx: ReconcileContext) -> Iterator[Action]:
    """Keys for rollouts whose containers have not started; one that runs has read its own. Its pod comes first, for the
    Secret goes with it, and waits for it on its node."""
    waiting = tuple(
        (pod.name, pod.uid)
        for pod in ctx.facts.of_role(Role.ROLLOUT)
        if pod.phase is PodPhase.PENDING and pod.deletion_at is None and pod.uid not in ctx.state.keys_made
    )
    if waiting:
        yield MakeEngineKeys(names.keys_secret_name(ctx.facts.name), waiting)


def ended_engines(ctx: ReconcileContext) -> Iterator[DrainEngine]:
    """Names that the manager is to refuse from now on: of rollouts gone since the last reconcile, and of those that it
    lists though they have no pod, which is what a proof that was copied from a lost node looks like."""
    if ctx.facts.manager is None:
        return
    live = {pod.name for pod in ctx.facts.of_role(Role.ROLLOUT) if not pod.ended}
    gone = {last.name for last in ctx.state.last_seen.values() if last.role is Role.ROLLOUT}
    if ctx.state.began_at is not None and ctx.now - ctx.state.began_at >= POD_UNSEEN_S:
        listed = {engine.name for engine in ctx.facts.manager.status.engines}
        gone |= {one for one in listed if one == names.pod_name(ctx.facts.name, Role.ROLLOUT, names.ordinal_of(one))}
    for name in sorted(gone - live):
        yield DrainEngine(name, f"ended/{name}", deadline_s=0.0, why="its pod is gone", ended=True)


def limited(split: CapacitySplit) -> CapacitySplit:
    """Pods to create in this reconcile: base on-demand, stand-ins, then spot."""
    on_demand = min(split.on_demand, MAX_CREATIONS)
    standing_in = max(0, on_demand - (split.on_demand - split.standing_in))
    return replace(split, spot=min(split.spot, MAX_CREATIONS - on_demand), on_demand=on_demand, standing_in=standing_in)


def unconfirmed_drains(ctx: ReconcileContext, fleet: Sequence[RolloutPod]) -> tuple[list[Action], float | None]:
    """Drains that the manager has not confirmed yet, and when to repeat them."""
    drains: list[Action] = []
    for one in fleet:
        if one.state is PodState.PREEMPTED and one.notice is not None and _works(ctx, one):
            left, why = max(0.0, one.notice.deadline - ctx.now), f"{one.notice.kind}: {one.notice.why}"
            drains.append(DrainEngine(one.pod.name, one.pod.uid, deadline_s=left, why=why))
    return drains, ctx.now + DRAIN_REPEAT_S if drains else None


def release_rollouts(ctx: ReconcileContext, leaving: Sequence[tuple[RolloutPod, str]]) -> list[Action]:
    """Annotates each pod with the reason, has its work moved, and deletes it with its own grace. All annotations come
    first, then all drains, because actions of one kind in a row are sent side by side."""
    releases = [action for one, why in leaving for action in release(one.pod, why)]
    working = [(one.pod, why) for one, why in leaving if _works(ctx, one)]
    drains = [DrainEngine(pod.name, pod.uid, deadline_s=ctx.drain_s, why=why) for pod, why in working]
    annotations = [action for action in releases if isinstance(action, Annotate)]
    return [*annotations, *drains, *(action for action in releases if isinstance(action, Delete))]


def vanished(ctx: ReconcileContext, role: Role) -> list[LastSeenPod]:
    """Pods of the last reconcile that are gone without a signal."""
    there = {pod.uid for pod in ctx.facts.pods}
    gone = [pod for uid, pod in ctx.state.last_seen.items() if uid not in there]
    return [pod for pod in gone if pod.role is role and not pod.settled]


def _works(ctx: ReconcileContext, one: RolloutPod) -> bool:
    """Its engine may hold samples, and the manager has not confirmed its drain yet."""
    if one.pod.ended or one.pod.scheduled_at is None or one.pod.uid in ctx.state.drains_confirmed:
        return False
    if one.engine is not None:
        return one.engine.state is not EngineState.DRAINING
    return not ctx.manager_answers and one.pod.uid in ctx.state.registered


def _numbers(ctx: ReconcileContext, fleet: Sequence[RolloutPod], missing: Sequence[LastSeenPod]) -> Iterator[Action]:
    pods = [one.pod for one in fleet]
    preemptions = total(pods, LossCounter.PREEMPTION, ctx.status.rollout.preemptions, missing)
    failures = total(pods, LossCounter.FAILURE, ctx.status.rollout.failures, missing)
    new = [one for one in fleet if one.loss_number is None]
    preempted = [one.pod.uid for one in new if one.state is PodState.PREEMPTED and one.notice is not None]
    failed = [one.pod.uid for one in new if one.state is PodState.FAILED]
    assigned = assign_numbers(preempted, LossCounter.PREEMPTION, preemptions, ctx.state.last_seen)
    assigned |= assign_numbers(failed, LossCounter.FAILURE, failures, ctx.state.last_seen)
    for one in new:
        if one.pod.uid in assigned:
            yield _numbered(ctx, one, assigned[one.pod.uid])


def _numbered(ctx: ReconcileContext, one: RolloutPod, loss_number: LossNumber) -> Annotate:
    annotations, why = {names.ANNOTATION_COUNTED: str(loss_number)}, f"it failed: {one.why}"
    if loss_number.counter is LossCounter.PREEMPTION and one.notice is not None:
        why = f"it is taken away ({one.notice.why})"
        annotations[names.ANNOTATION_NOTICED_AT] = millisecond(ctx.now)
        annotations[names.ANNOTATION_NOTICE] = one.notice.kind.value
    return Annotate(one.pod.name, one.pod.uid, annotations=annotations, why=why)


def _creations(ctx: ReconcileContext, fleet: Sequence[RolloutPod], split: CapacitySplit) -> Iterator[Action]:
    ordinal = ctx.highest_ordinal(Role.ROLLOUT)
    lost = sum(one.state in (PodState.PREEMPTED, PodState.FAILED) for one in fleet)
    for pool, number in ((Pool.ON_DEMAND, split.on_demand), (Pool.SPOT, split.spot)):
        for _ in range(number):
            ordinal += 1
            why = "another is lost or leaves" if lost > 0 else "the fleet is smaller than desired"
            lost -= 1
            yield Create(rollout_pod(ctx.owner, ordinal, pool), why)


def _leaving(
    ctx: ReconcileContext,
    fleet: Sequence[RolloutPod],
    desired: int,
    views: Sequence[PoolView],
    split: CapacitySplit,
    boundary: bool | None,
) -> list[tuple[RolloutPod, str]]:
    """Each once, with the reason that came first."""
    fixed = base(ctx.spec.rollout, desired)
    back = victims(fleet, split.stand_ins_to_release, fixed, stand_ins(fleet, fixed))
    waited = [one for view in views for one in view.surplus]
    probes = [one for one in of_pool(fleet, Pool.SPOT) if one.state is PodState.PENDING and one not in waited]
    replaced = list(reversed(probes))[: split.spot_to_release]
    vanished = {one.pod.uid for one in (*waited, *replaced, *back)}
    rest = [one for one in fleet if one.pod.uid not in vanished]
    excess = victims(rest, split.excess, fixed)
    chosen = [(one, "it waited in vain for a node") for one in waited]
    chosen += [(one, "a stand-in has its place") for one in replaced]
    chosen += [(one, "spot is back") for one in back]
    chosen += [(one, "the fleet is larger than desired") for one in excess]
    if not chosen:
        chosen = [(one, "its template was changed") for one in to_replace(ctx, fleet, desired, boundary)]
    first: dict[str, tuple[RolloutPod, str]] = {}
    for one, why in chosen:
        first.setdefault(one.pod.uid, (one, why))
    return list(first.values())


def _deletions(ctx: ReconcileContext, fleet: Sequence[RolloutPod]) -> tuple[list[Action], float | None]:
    """Lost pods that are counted in the stored status; released ones whose deletion did not get through."""
    actions: list[Action] = []
    dues: list[float] = []
    for one in fleet:
        if one.pod.deletion_at is not None or not _is_stored(ctx, one):
            continue
        lost = one.notice is None or one.notice.kind is DisruptionKind.LOST
        overstays = ctx.now if lost or one.notice is None else one.notice.deadline + OVERSTAY_S
        if one.state is PodState.PREEMPTED and not one.pod.ended and ctx.now < overstays:
            dues.append(overstays)
        else:
            actions.append(Delete("Pod", one.pod.name, uid=one.pod.uid, why=_deletion_reason(one)))
    return actions, min(dues, default=None)


def _is_stored(ctx: ReconcileContext, one: RolloutPod) -> bool:
    if one.state is PodState.DELETING:
        return True
    if one.loss_number is None or one.state not in (PodState.PREEMPTED, PodState.FAILED):
        return False
    stored, failed = ctx.status.rollout, one.loss_number.counter is LossCounter.FAILURE
    return one.loss_number.number <= (stored.failures if failed else stored.preemptions)


def _deletion_reason(one: RolloutPod) -> str:
    if one.state is PodState.DELETING:
        return one.pod.annotations.get(names.ANNOTATION_RELEASED, "") or "the run is over"
    return "it failed and is counted" if one.state is PodState.FAILED else "it was taken away and is counted"


def victims(
    fleet: Sequence[RolloutPod], number: int, num_base: int, among: Sequence[RolloutPod] | None = None
) -> list[RolloutPod]:
    """The `number` of live rollouts that cost least to lose, cheapest first; `among` narrows the choice.

        1 has no node yet    2 at risk    3 not yet registered    4 a stand-in while spot serves    5 any other

    and within each: older weights, fewer samples running (least remaining work), alone on its node, younger. The first
    `num_base` on-demand pods come last of all: they are no stand-ins, and there to stay."""
    live = [one for one in fleet if one.live]
    kept = {one.pod.uid for one in _established(live)[:num_base]}
    newest = max((one.engine.weight_version for one in live if one.engine is not None), default=-1)
    shared = Counter(one.pod.node for one in live)
    spot_serves = any(one.state is PodState.SERVING and one.pool is Pool.SPOT for one in live)

    def key(one: RolloutPod) -> tuple[int, bool, int, bool, float, int]:
        stale = one.engine is None or one.engine.weight_version < newest
        running = 0 if one.engine is None else one.engine.running
        alone = shared[one.pod.node] == 1
        rank = 9 if one.pod.uid in kept else _rank(one, spot_serves)
        return rank, not stale, running, not alone, -one.pod.created_at, -names.ordinal_of(one.pod.name)

    choice = live if among is None else [one for one in among if one.live]
    return sorted(choice, key=key)[: max(0, number)]


def stand_ins(fleet: Sequence[RolloutPod], num_base: int) -> list[RolloutPod]:
    """On-demand pods beyond the `num_base` that are there to stay."""
    return _established(list(fleet))[num_base:]


def _established(live: list[RolloutPod]) -> list[RolloutPod]:
    """On-demand pods, those first that have come furthest."""
    return sorted(of_pool(live, Pool.ON_DEMAND), key=lambda one: (-one.state.value, one.pod.created_at, one.pod.name))


def _rank(one: RolloutPod, spot_serves: bool) -> int:
    if one.state is PodState.PENDING:
        return 1
    if one.notice is not None:
        return 2
    if one.state is PodState.STARTING:
        return 3
    return 4 if spot_serves and one.pool is Pool.ON_DEMAND else 5


def outdated(ctx: ReconcileContext, fleet: Sequence[RolloutPod], desired: int) -> list[RolloutPod]:
    """Live rollouts of another template, or spot ones where the policy has no room for any."""
    newest = ctx.hashes.templates[Role.ROLLOUT]
    unwanted = {one.pod.uid for one in of_pool(fleet, Pool.SPOT)[desired - base(ctx.spec.rollout, desired) :]}
    return [one for one in fleet if one.live and (one.pod.template_hash != newest or one.pod.uid in unwanted)]


def to_replace(
    ctx: ReconcileContext, fleet: Sequence[RolloutPod], desired: int, boundary: bool | None
) -> list[RolloutPod]:
    """Those to release now: pods without a node at once, the others only at a boundary between steps, and never so
    many that more than maxUnavailable of the desired number do not serve."""
    update = ctx.spec.rollout.update
    old = outdated(ctx, fleet, desired)
    if update.type != "Rolling" or not old or boundary is None:
        return []
    waiting = [one for one in old if one.state is PodState.PENDING]
    if not boundary:
        return waiting
    serving = sum(one.state is PodState.SERVING for one in fleet)
    starting = [one for one in old if one.state is PodState.STARTING]
    number = max(0, serving - max(0, desired - update.max_unavailable))
    in_use = [one for one in old if one.state is PodState.SERVING]
    return [*waiting, *starting, *victims(fleet, number, base(ctx.spec.rollout, desired), in_use)]
