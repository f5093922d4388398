"""How the fleet is split between spot and on-demand, and what to ask of each pool now.

    OnDemand        all on-demand
    Spot            the first baseOnDemand on-demand, the rest spot
    SpotPreferred   the same; once spot has been short for fallback.afterSeconds, on-demand pods stand in for what is
                    missing, beside one spot pod that waits as a probe; others that wait make way for them. As spot
                    pods serve again, stand-ins leave, one for each; meanwhile one spot pod is on its way at a time

Beside stand-ins the fleet may have one pod more than wished: the spot pod on its way. Pods with nodes never exceed
maxReplicas: when that one gets its node, a stand-in goes at once if it must.
Refuses to hold: back-off (see `pools`), who of equals goes first (see `victims`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polyrl.cluster.fleet.pools import PoolView
from polyrl.cluster.observation.disruption import SCHEDULER
from polyrl.cluster.observation.rollouts import Rollout, Standing
from polyrl.cluster.timestamps import unix
from polyrl.manifest.rollout import CapacityPolicy, RolloutSpec
from polyrl.sample import Pool


@dataclass(frozen=True)
class Mix:
    """What to make, and how many to let go."""

    spot: int = 0
    """Spot pods to make."""
    on_demand: int = 0
    """On-demand pods to make."""
    standing_in: int = 0
    """How many of these stand in for spot."""
    spot_back: int = 0
    """Spot pods without a node to let go: a stand-in has their place."""
    stand_ins_back: int = 0
    """Stand-ins to let go: a spot pod has their place."""
    excess: int = 0
    """Any pods to let go: the fleet is larger than wished."""
    due: float | None = None
    """Unix seconds at which stand-ins may be called."""


@dataclass(frozen=True)
class _Half:
    """The pods of one pool that hold a place; those not yet counted as failed, or that just left, still do."""

    all: int
    placed: int
    """With a node."""
    serving: int

    @property
    def waiting(self) -> int:
        return self.all - self.placed


def base(spec: RolloutSpec, wished: int) -> int:
    """On-demand pods that are no stand-ins, in a fleet of `wished`."""
    if spec.capacity.policy is CapacityPolicy.ON_DEMAND:
        return wished
    return min(spec.capacity.base_on_demand, wished)


def mix(fleet: Sequence[Rollout], wished: int, spec: RolloutSpec, views: Sequence[PoolView], now: float) -> Mix:
    """For a fleet of `wished` rollouts; `views` as `pools.pool_views` gives them."""
    spot_view, on_demand_view = views
    spot, on_demand = _half(fleet, Pool.SPOT, spot_view), _half(fleet, Pool.ON_DEMAND, on_demand_view)
    fixed = base(spec, wished)
    slots, stand_ins = wished - fixed, max(0, on_demand.all - fixed)
    called, due = _called(spec, slots, spot, spot_view, now)
    wanted = min(slots, max(called, min(stand_ins, slots - spot.serving)))
    surge = 1 if wanted > 0 else 0
    spot_back = min(spot.waiting, max(0, spot.all - (slots - wanted + surge))) if called else 0
    free = wished + surge - spot.all - on_demand.all + spot_back
    make_on_demand = max(0, min(fixed + wanted - on_demand.all, free, on_demand_view.room))
    make_spot = max(0, min(slots - wanted + surge - spot.all, free - make_on_demand, spot_view.room))
    over_max = spot.placed + on_demand.placed - spec.max_replicas
    back = min(stand_ins, max(stand_ins - wanted, over_max if surge else 0, 0))
    standing_in = max(0, make_on_demand - max(0, fixed - on_demand.all))
    return Mix(make_spot, make_on_demand, standing_in, spot_back, back, max(0, -free - back), due)


def _half(fleet: Sequence[Rollout], pool: Pool, view: PoolView) -> _Half:
    leaving = {one.pod.uid for one in view.surplus}
    failed = [one for one in fleet if one.pool is pool and _undecided(one)]
    live = [one for one in fleet if one.pool is pool and one.live and one.pod.uid not in leaving]
    waiting = sum(one.standing is Standing.WAITING for one in live)
    serving = sum(one.standing is Standing.SERVING for one in live)
    return _Half(len(live) + len(failed), len(live) + len(failed) - waiting, serving)


def _undecided(one: Rollout) -> bool:
    """Its back-off begins once it is counted, or it is not known yet what its end means."""
    pushed_out = one.standing is Standing.TAKEN and one.pod.disruption == SCHEDULER
    backs_off = one.standing is Standing.FAILED or pushed_out
    return one.standing is Standing.LEFT or (backs_off and one.counted is None)


def _called(spec: RolloutSpec, slots: int, spot: _Half, view: PoolView, now: float) -> tuple[int, float | None]:
    """How many stand-ins are called for, and when that may change by time alone."""
    since, fallback = unix(view.status.limited_since), spec.capacity.fallback
    if not fallback.enabled or since is None:
        return 0, None
    if now < since + fallback.after_seconds:
        return 0, since + fallback.after_seconds
    short = max(0, slots - spot.placed)
    return (short if fallback.max_replicas is None else min(short, fallback.max_replicas)), None
