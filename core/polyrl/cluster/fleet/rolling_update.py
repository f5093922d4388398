"""Rolling a changed template out: old rollouts make way between two steps, a few at a time.

Refuses to hold: what a template is (see `objects.hashes`), how the new pods are made (see `mix`). Read next: `victims`.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyrl.cluster.fleet.capacity_split import base
from polyrl.cluster.fleet.victims import victims
from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.rollouts import PodState, RolloutPod, of_pool
from polyrl.sample import Pool
from polyrl.worker import Role


def outdated(ctx: ReconcileContext, fleet: Sequence[RolloutPod], desired: int) -> list[RolloutPod]:
    """Live rollouts of another template, or spot ones where the policy has no room for any."""
    newest = ctx.hashes.templates[Role.ROLLOUT]
    unwanted = {one.pod.uid for one in of_pool(fleet, Pool.SPOT)[desired - base(ctx.spec.rollout, desired) :]}
    return [one for one in fleet if one.live and (one.pod.template_hash != newest or one.pod.uid in unwanted)]


def to_replace(ctx: ReconcileContext, fleet: Sequence[RolloutPod], desired: int, boundary: bool) -> list[RolloutPod]:
    """Those to let go in this look. A pod without a node goes at once; the others only at a boundary between steps, and
    never so many that more than maxUnavailable of the wished number do not serve."""
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
