"""What the job has cost: seconds that its pods held nodes, at the manifest's prices, in millionths of its currency.

Charged when a pod ends, and else once a minute, so that money alone does not change the status at every reconcile. Time
in which the operator is down is charged when it comes back, for pods that are still there.
"""

from __future__ import annotations

from typing import Final

from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.facts import PodFacts
from polyrl.cluster.timestamps import millisecond, unix
from polyrl.manifest.status import Cost
from polyrl.sample import Pool
from polyrl.worker import Role

CHARGE_EVERY_S: Final = 60.0
MICROS_PER_SECOND: Final = 1e6 / 3600
"""Of a price of 1 per hour."""


def cost(ctx: ReconcileContext, *, closing: bool) -> Cost:
    """Cost after this reconcile. `closing`: the job ended in it, so that all is charged now."""
    stored = ctx.status.cost
    prices = ctx.spec.pricing
    by_field = {
        "reserved_micros": prices.reserved_per_hour,
        "spot_micros": prices.spot_per_hour,
        "on_demand_micros": prices.on_demand_per_hour,
    }
    since = unix(stored.accounted_time)
    if not any(by_field.values()):
        return stored
    if since is not None and ctx.now - since < CHARGE_EVERY_S and not closing and not _ended_since(ctx):
        return stored
    seconds = _seconds(ctx, ctx.now if since is None else since)
    update: dict[str, object] = {
        field: getattr(stored, field) + round(seconds[field] * (price or 0.0) * MICROS_PER_SECOND)
        for field, price in by_field.items()
    }
    return stored.model_copy(update=update | {"accounted_time": millisecond(ctx.now)})


def runs_since(pod: PodFacts) -> float | None:
    """When the pod began to hold a node; None: it does not."""
    return None if pod.ended else pod.scheduled_at


def _ended_since(ctx: ReconcileContext) -> bool:
    there = {pod.uid for pod in ctx.facts.pods if not pod.ended}
    return any(pod.runs_since is not None and uid not in there for uid, pod in ctx.state.last_seen.items())


def _seconds(ctx: ReconcileContext, since: float) -> dict[str, float]:
    """Per share: seconds that pods held nodes since the last charge; one that ended meanwhile is charged until now."""
    started = {uid: (pod.role, pod.pool, pod.runs_since) for uid, pod in ctx.state.last_seen.items()}
    started |= {pod.uid: (pod.role, pod.pool, runs_since(pod)) for pod in ctx.facts.pods if not pod.ended}
    total = dict.fromkeys(("reserved_micros", "spot_micros", "on_demand_micros"), 0.0)
    for role, pool, start in started.values():
        if start is None or role is Role.MANAGER:
            continue
        share = "on_demand_micros" if pool is Pool.ON_DEMAND else "spot_micros"
        total["reserved_micros" if role is Role.TRAINER else share] += max(0.0, ctx.now - max(since, start))
    return total
