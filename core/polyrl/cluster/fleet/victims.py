"""Who goes first when the fleet shrinks: who costs least to lose.

    1 has no node yet    2 at risk    3 not yet registered    4 a stand-in while spot serves    5 any other
and within each: older weights, fewer samples running (least remaining work), alone on its node, younger. On-demand pods
of `baseOnDemand` come last of all: they are there to stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, TypeAlias

from polyrl.cluster import names
from polyrl.cluster.fleet.capacity_split import base
from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.rollouts import PodState, RolloutPod, of_pool
from polyrl.sample import Pool
from polyrl.worker import Role

_LAST: Final = 9

_Key: TypeAlias = tuple[int, int, int, int, float, int]


def victims(
    fleet: Sequence[RolloutPod], number: int, base: int, among: Sequence[RolloutPod] | None = None
) -> list[RolloutPod]:
    """The `number` of live rollouts that cost least to lose, cheapest first; `base` on-demand ones are no stand-ins.
    `among` narrows the choice."""
    live = [one for one in fleet if one.live]
    kept = {one.pod.uid for one in _established(live)[:base]}
    newest = max((one.engine.weight_version for one in live if one.engine is not None), default=-1)
    shared = Counter(one.pod.node for one in live)
    spot_serves = any(one.state is PodState.SERVING and one.pool is Pool.SPOT for one in live)

    def key(one: RolloutPod) -> _Key:
        stale = one.engine is None or one.engine.weight_version < newest
        running = 0 if one.engine is None else one.engine.running
        alone = shared[one.pod.node] == 1
        rank = _LAST if one.pod.uid in kept else _rank(one, spot_serves)
        return rank, not stale, running, not alone, -one.pod.created_at, -names.ordinal_of(one.pod.name)

    choice = live if among is None else [one for one in among if one.live]
    return sorted(choice, key=key)[: max(0, number)]


def stand_ins(fleet: Sequence[RolloutPod], base: int) -> list[RolloutPod]:
    """On-demand pods beyond the `base` that is there to stay."""
    return _established(list(fleet))[base:]


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


def to_replace(ctx: ReconcileContext, fleet: Sequence[RolloutPod], desired: int, boundary: bool) -> list[RolloutPod]:
    """Those to release now: pods without a node at once, the others only at a boundary between steps, and never so
    many that more than maxUnavailable of the desired number do not serve."""
    update = ctx.spec.rollout.update
    old = outdated(ctx, fleet, desired)
    if update.type != "Rolling" or not old:
        return []
    waiting = [one for one in old if one.state is PodState.PENDING]
    if not boundary:
        return waiting
    serving = sum(one.state is PodState.SERVING for one in fleet)
    starting = [one for one in old if one.state is PodState.STARTING]
    number = max(0, serving - max(0, desired - update.max_unavailable))
    in_use = [one for one in old if one.state is PodState.SERVING]
    return [*waiting, *starting, *victims(fleet, number, base(ctx.spec.rollout, desired), in_use)]
