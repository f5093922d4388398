"""Rolling a changed template out: old rollouts make way between two steps, a few at a time.

Refuses to hold: what a template is (see `objects.hashes`), how the new pods are made (see `mix`). Read next: `victims`.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyrl.cluster.fleet.capacity_split import base
from polyrl.cluster.fleet.victims import victims
from polyrl.cluster.observation.context import Look
from polyrl.cluster.observation.rollouts import Rollout, Standing, of_pool
from polyrl.sample import Pool
from polyrl.worker import Role


def outdated(look: Look, fleet: Sequence[Rollout], wished: int) -> list[Rollout]:
    """Live rollouts of another template, or spot ones where the policy has no room for any."""
    newest = look.written.templates[Role.ROLLOUT]
    unwanted = {one.pod.uid for one in of_pool(fleet, Pool.SPOT)[wished - base(look.spec.rollout, wished) :]}
    return [one for one in fleet if one.live and (one.pod.template_hash != newest or one.pod.uid in unwanted)]


def making_way(look: Look, fleet: Sequence[Rollout], wished: int, boundary: bool) -> list[Rollout]:
    """Those to let go in this look. A pod without a node goes at once; the others only at a boundary between steps, and
    never so many that more than maxUnavailable of the wished number do not serve."""
    update = look.spec.rollout.update
    old = outdated(look, fleet, wished)
    if update.type != "Rolling" or not old:
        return []
    waiting = [one for one in old if one.standing is Standing.WAITING]
    if not boundary:
        return waiting
    serving = sum(one.standing is Standing.SERVING for one in fleet)
    starting = [one for one in old if one.standing is Standing.STARTING]
    number = max(0, serving - max(0, wished - update.max_unavailable))
    in_use = [one for one in old if one.standing is Standing.SERVING]
    return [*waiting, *starting, *victims(fleet, number, base(look.spec.rollout, wished), in_use)]
