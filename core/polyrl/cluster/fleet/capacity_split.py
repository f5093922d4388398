"""How the fleet is split between spot and on-demand, and what to ask of each pool now.

    OnDemand        all on-demand
    Spot            the first baseOnDemand on-demand, the rest spot
    SpotPreferred   the same; once spot has been short for fallback.afterSeconds, on-demand pods stand in for what is
                    missing, beside one spot pod that waits as a probe; others that wait make way for them. As spot
                    pods serve again, stand-ins leave, one for each; meanwhile one spot pod is on its way at a time

Beside stand-ins the fleet may have one pod more than desired: the spot pod on its way. Pods with nodes never exceed
maxReplicas: when that one gets its node, a stand-in goes at once if it must.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from polyrl.cluster.fleet.pools import PoolView
from polyrl.cluster.observation.disruption import SCHEDULER
from polyrl.cluster.observation.rollouts import PodState, RolloutPod
from polyrl.cluster.timestamps import unix
from polyrl.manifest.rollout import CapacityPolicy, RolloutSpec
from polyrl.sample import Pool

ANY_NUMBER: Final = 1 << 20
"""More on-demand pods than any fleet has."""


@dataclass(frozen=True)
class CapacitySplit:
    """What to make, and how many to release."""

    spot: int = 0
    """Spot pods to make."""
    on_demand: int = 0
    """On-demand pods to make."""
    standing_in: int = 0
    """How many of these stand in for spot."""
    spot_to_release: int = 0
    """Spot pods without a node to release: a stand-in has their place."""
    stand_ins_to_release: int = 0
    """Stand-ins to release: a spot pod has their place."""
    excess: int = 0
    """Any pods to release: the fleet is larger than desired."""
    due: float | None = None
    """Unix seconds at which stand-ins may be called."""


@dataclass(frozen=True)
class _PoolCount:
    """The pods of one pool that hold a place; those not yet counted as failed, or that just left, still do."""

    all: int
    placed: int
    """Pods that have a node."""
    serving: int

    @property
    def waiting(self) -> int:
        return self.all - self.placed


def base(spec: RolloutSpec, desired: int) -> int:
    """On-demand pods that are no stand-ins, in a fleet of `desired`."""
    if spec.capacity.policy is CapacityPolicy.ON_DEMAND:
        return desired
    return min(spec.capacity.base_on_demand, desired)


def capacity_split(
    fleet: Sequence[RolloutPod],
    desired: int,
    spec: RolloutSpec,
    views: Sequence[PoolView],
    now: float,
    max_on_demand: int = ANY_NUMBER,
) -> CapacitySplit:
    """For a fleet of `desired` rollouts, at most `max_on_demand` of them on-demand, for that is what a budget pays;
    `views` as `pools.pool_views` gives them."""
    spot_view, on_demand_view = views
    spot, on_demand = _count(fleet, Pool.SPOT, spot_view), _count(fleet, Pool.ON_DEMAND, on_demand_view)
    fixed = base(spec, desired)
    slots, stand_ins = desired - fixed, max(0, on_demand.all - fixed)
    stand_ins_wanted, due = _stand_ins_wanted(spec, slots, spot, spot_view, now)
    stand_ins_wanted = min(stand_ins_wanted, max(0, max_on_demand - fixed))
    kept = min(stand_ins, slots - spot.serving, max(0, max_on_demand - fixed))
    wanted = min(slots, max(stand_ins_wanted, kept))
    surge = 1 if wanted > 0 else 0
    spot_to_release = min(spot.waiting, max(0, spot.all - (slots - wanted + surge))) if stand_ins_wanted else 0
    free = desired + surge - spot.all - on_demand.all + spot_to_release
    make_on_demand = max(0, min(fixed + wanted - on_demand.all, free, on_demand_view.room))
    make_spot = max(0, min(slots - wanted + surge - spot.all, free - make_on_demand, spot_view.room))
    over_max = spot.placed + on_demand.placed - spec.max_replicas
    back = min(stand_ins, max(stand_ins - wanted, over_max if surge else 0, 0))
    standing_in = max(0, make_on_demand - max(0, fixed - on_demand.all))
    made = CapacitySplit(make_spot, make_on_demand, standing_in=standing_in, due=due)
    return replace(made, spot_to_release=spot_to_release, stand_ins_to_release=back, excess=max(0, -free - back))


def _count(fleet: Sequence[RolloutPod], pool: Pool, view: PoolView) -> _PoolCount:
    leaving = {one.pod.uid for one in view.surplus}
    failed = [one for one in fleet if one.pool is pool and _undecided(one)]
    live = [one for one in fleet if one.pool is pool and one.live and one.pod.uid not in leaving]
    waiting = sum(one.state is PodState.PENDING for one in live)
    serving = sum(one.state is PodState.SERVING for one in live)
    return _PoolCount(len(live) + len(failed), len(live) + len(failed) - waiting, serving=serving)


def _undecided(one: RolloutPod) -> bool:
    """Its back-off begins once it is counted, or it is not known yet what its end means."""
    pushed_out = one.state is PodState.PREEMPTED and one.pod.disruption == SCHEDULER
    backs_off = one.state is PodState.FAILED or pushed_out
    return one.state is PodState.EXITED or (backs_off and one.loss_number is None)


def _stand_ins_wanted(
    spec: RolloutSpec, slots: int, spot: _PoolCount, view: PoolView, now: float
) -> tuple[int, float | None]:
    """How many stand-ins are called for, and when that may change by time alone."""
    since, fallback = unix(view.status.limited_since), spec.capacity.fallback
    if not fallback.enabled or since is None:
        return 0, None
    if now < since + fallback.after_seconds:
        return 0, since + fallback.after_seconds
    short = max(0, slots - spot.placed)
    return (short if fallback.max_replicas is None else min(short, fallback.max_replicas)), None
