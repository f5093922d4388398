"""What to do about the rollouts of a running job, most urgent first.

    1 drain what the cluster takes: its engine's work moves while it still runs
    2 number what was lost, so that it is counted once
    3 make what is missing, replacements of the lost in this very pass
    4 let go what is too many, stands in no longer, or is of an old template
    5 delete what is lost and counted

One look makes and lets go so many at most; the rest follows in the next looks, because what has happened meanwhile, a
notice above all, is seen only then.
Refuses to hold: each policy (`pools`, `mix`, `victims`, `updates`, `counting`). Read next: `mix`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from polyrl.cluster import names
from polyrl.cluster.actions import Action, Annotate, Create, Delete, Drain
from polyrl.cluster.fleet.capacity_split import Mix, base, mix
from polyrl.cluster.fleet.pools import PoolView
from polyrl.cluster.fleet.removal import release
from polyrl.cluster.fleet.rolling_update import making_way
from polyrl.cluster.fleet.victims import stand_ins, victims
from polyrl.cluster.observation.context import Look
from polyrl.cluster.observation.exactly_once import Counted, Tally, numbers, total
from polyrl.cluster.observation.node_signals import Kind
from polyrl.cluster.observation.rollouts import Rollout, Standing, next_due, of_pool
from polyrl.cluster.resources.rollout import rollout_pod
from polyrl.cluster.state import SeenPod
from polyrl.cluster.timestamps import millisecond
from polyrl.sample import Pool
from polyrl.status import EngineState
from polyrl.worker import Role

OVERSTAY_S: Final = 10.0
"""A drained pod that lives so long beyond its deadline is deleted by us, so that nothing half-gone stays."""

TELL_AGAIN_S: Final = 2.0
"""A drain that the manager did not confirm is repeated after so long."""

AT_ONCE: Final = 50
"""Pods made in one look: under a second of requests even on a server that takes 100 ms for each."""

GO_AT_ONCE: Final = 25
"""Pods let go in one look: two requests each."""

REST_S: Final = 0.05
"""Until the look that goes on with the rest, should nothing have been heard of what this one did."""


Gone: TypeAlias = Sequence[SeenPod]
"""Rollouts of the last look that are not there any more."""


@dataclass(frozen=True)
class Plan:
    """Actions in order, and when to look again."""

    actions: tuple[Action, ...]
    made: dict[Pool, int]
    """Pods asked for in this look."""
    standing_in: int
    """On-demand pods among them that stand in for spot."""
    let_go: dict[str, int]
    """Pods let go in this look, by reason."""
    due: float | None = None


def fleet_plan(
    look: Look,
    fleet: Sequence[Rollout],
    wished: int,
    views: Sequence[PoolView],
    boundary: bool,
    gone: Sequence[SeenPod],
) -> Plan:
    """For a fleet of `wished`; those of `gone` are counted in this look without being numbered."""
    whole = mix(fleet, wished, look.spec.rollout, views, look.now)
    split = at_once(whole)
    every = _leaving(look, fleet, wished, views, split, boundary)
    leaving = every[:GO_AT_ONCE]
    drains, told_due = drains_of(look, fleet)
    removals, stay_due = _removals(look, fleet)
    actions: list[Action] = [*drains, *_numbers(look, fleet, gone), *_creations(look, fleet, split)]
    actions += let_go(look, leaving)
    dues = [split.due, told_due, stay_due, next_due(fleet, look), *(view.due for view in views)]
    dues.append(look.now + REST_S if split != whole or leaving != every else None)
    reasons: dict[str, int] = {}
    for _, why in leaving:
        reasons[why] = reasons.get(why, 0) + 1
    made = {Pool.SPOT: split.spot, Pool.ON_DEMAND: split.on_demand}
    due = min((due for due in dues if due is not None and due > look.now), default=None)
    return Plan((*actions, *removals), made, split.standing_in, reasons, due)


def at_once(split: Mix) -> Mix:
    """What one look makes of it: on-demand first, and of these the stand-ins last."""
    on_demand = min(split.on_demand, AT_ONCE)
    standing_in = max(0, on_demand - (split.on_demand - split.standing_in))
    return replace(split, spot=min(split.spot, AT_ONCE - on_demand), on_demand=on_demand, standing_in=standing_in)


def drains_of(look: Look, fleet: Sequence[Rollout]) -> tuple[list[Action], float | None]:
    """Drains that the manager has not confirmed yet, and when to repeat them."""
    drains: list[Action] = [
        Drain(
            one.pod.name, one.pod.uid, max(0.0, one.notice.deadline - look.now), f"{one.notice.kind}: {one.notice.why}"
        )
        for one in fleet
        if one.standing is Standing.TAKEN and one.notice is not None and _works(look, one)
    ]
    return drains, look.now + TELL_AGAIN_S if drains else None


def let_go(look: Look, leaving: Sequence[tuple[Rollout, str]]) -> list[Action]:
    """Notes our wish on each pod, has its work moved, and deletes it with its own grace; all of one sort together."""
    wishes = [action for one, why in leaving for action in release(one.pod, why)]
    drains = [Drain(one.pod.name, one.pod.uid, look.drain_s, why) for one, why in leaving if _works(look, one)]
    notes = [action for action in wishes if isinstance(action, Annotate)]
    return [*notes, *drains, *(action for action in wishes if isinstance(action, Delete))]


def rollouts_made(look: Look) -> int:
    """Highest number that a rollout has had."""
    seen = [names.ordinal_of(pod.name) for pod in look.facts.of_role(Role.ROLLOUT)]
    return max([look.status.rollout.created, *seen])


def vanished(look: Look, role: Role) -> list[SeenPod]:
    """Pods of the last look that are gone without a sign of theirs."""
    there = {pod.uid for pod in look.facts.pods}
    return [pod for uid, pod in look.memory.seen.items() if uid not in there and pod.role is role and not pod.settled]


def _works(look: Look, one: Rollout) -> bool:
    """Its engine may hold samples, and the manager has not been told yet."""
    if one.pod.ended or one.pod.scheduled_at is None or one.pod.uid in look.memory.drains_told:
        return False
    if one.engine is not None:
        return one.engine.state is not EngineState.DRAINING
    return not look.manager_answers and one.pod.uid in look.memory.registered


def _numbers(look: Look, fleet: Sequence[Rollout], gone: Gone) -> Iterator[Action]:
    pods = [one.pod for one in fleet]
    preempted = total(pods, Tally.PREEMPTION, look.status.rollout.preemptions, gone)
    failed = total(pods, Tally.FAILURE, look.status.rollout.failures, gone)
    new = [one for one in fleet if one.counted is None]
    taken = [one.pod.uid for one in new if one.standing is Standing.TAKEN and one.notice is not None]
    broken = [one.pod.uid for one in new if one.standing is Standing.FAILED]
    marks = numbers(taken, Tally.PREEMPTION, preempted, look.memory.seen)
    marks |= numbers(broken, Tally.FAILURE, failed, look.memory.seen)
    for one in new:
        if one.pod.uid in marks:
            yield _numbered(look, one, marks[one.pod.uid])


def _numbered(look: Look, one: Rollout, mark: Counted) -> Annotate:
    if mark.tally is Tally.FAILURE or one.notice is None:
        noted = {names.ANNOTATION_COUNTED: str(mark)}
        return Annotate(one.pod.name, one.pod.uid, noted, f"it failed: {one.why}")
    noted = {
        names.ANNOTATION_COUNTED: str(mark),
        names.ANNOTATION_NOTICED_AT: millisecond(look.now),
        names.ANNOTATION_NOTICE: one.notice.kind.value,
    }
    return Annotate(one.pod.name, one.pod.uid, noted, f"it is taken away ({one.notice.why})")


def _creations(look: Look, fleet: Sequence[Rollout], split: Mix) -> Iterator[Action]:
    ordinal = rollouts_made(look)
    lost = sum(one.standing in (Standing.TAKEN, Standing.FAILED) for one in fleet)
    for pool, number in ((Pool.ON_DEMAND, split.on_demand), (Pool.SPOT, split.spot)):
        for _ in range(number):
            ordinal += 1
            why = "another is lost or leaves" if lost > 0 else "the fleet is smaller than wished"
            lost -= 1
            yield Create(rollout_pod(look.owner, ordinal, pool, look.settings), why)


def _leaving(
    look: Look, fleet: Sequence[Rollout], wished: int, views: Sequence[PoolView], split: Mix, boundary: bool
) -> list[tuple[Rollout, str]]:
    """Each once, with the reason that came first."""
    fixed = base(look.spec.rollout, wished)
    back = victims(fleet, split.stand_ins_back, fixed, stand_ins(fleet, fixed))
    waited = [one for view in views for one in view.surplus]
    probes = [one for one in of_pool(fleet, Pool.SPOT) if one.standing is Standing.WAITING and one not in waited]
    replaced = list(reversed(probes))[: split.spot_back]
    gone = {one.pod.uid for one in (*waited, *replaced, *back)}
    rest = [one for one in fleet if one.pod.uid not in gone]
    excess = victims(rest, split.excess, fixed)
    chosen = [(one, "it waited in vain for a node") for one in waited]
    chosen += [(one, "a stand-in has its place") for one in replaced]
    chosen += [(one, "spot is back") for one in back]
    chosen += [(one, "the fleet is larger than wished") for one in excess]
    if not chosen:
        chosen = [(one, "its template was changed") for one in making_way(look, fleet, wished, boundary)]
    first: dict[str, tuple[Rollout, str]] = {}
    for one, why in chosen:
        first.setdefault(one.pod.uid, (one, why))
    return list(first.values())


def _removals(look: Look, fleet: Sequence[Rollout]) -> tuple[list[Action], float | None]:
    """Lost pods that are counted in the stored status; released ones whose deletion did not get through."""
    actions: list[Action] = []
    dues: list[float] = []
    for one in fleet:
        if one.pod.deletion_at is not None or not _is_stored(look, one):
            continue
        lost = one.notice is None or one.notice.kind is Kind.LOST
        overstays = look.now if lost or one.notice is None else one.notice.deadline + OVERSTAY_S
        if one.standing is Standing.TAKEN and not one.pod.ended and look.now < overstays:
            dues.append(overstays)
        else:
            actions.append(Delete("Pod", one.pod.name, one.pod.uid, _farewell(one)))
    return actions, min(dues, default=None)


def _is_stored(look: Look, one: Rollout) -> bool:
    if one.standing is Standing.RELEASED:
        return True
    if one.counted is None or one.standing not in (Standing.TAKEN, Standing.FAILED):
        return False
    stored = look.status.rollout
    return one.counted.number <= (stored.failures if one.counted.tally is Tally.FAILURE else stored.preemptions)


def _farewell(one: Rollout) -> str:
    if one.standing is Standing.RELEASED:
        return one.pod.annotations.get(names.ANNOTATION_RELEASED, "") or "the run is over"
    return "it failed and is counted" if one.standing is Standing.FAILED else "it was taken away and is counted"
