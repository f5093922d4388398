"""When the manager's certificate is replaced by a fresh one of the same authority: at half its life, so that seven days
are left for an operator that is down, an API server that refuses, a kubelet that is slow to bring the file.

The authority lives as long as the job: its key lies in the one Secret that no pod names, and who reads that has every
key of the run anyway. Only the leaf lies where a node can read it, and so only the leaf is short-lived.
"""

from __future__ import annotations

from typing import Final

from polyrl.cluster import names
from polyrl.cluster.actions import RenewCertificate
from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.resources.fixed import manager_hosts
from polyrl.worker import Role

LIFE_S: Final = 14 * 86_400.0
"""Seconds that a manager's certificate is valid: what was read from a lost node is worth nothing after them."""

SKEW_S: Final = 86_400.0
"""How far behind ours a node's clock may be: certificates begin by so much earlier."""

RENEWAL_RETRY_S: Final = 3_600.0
"""After a renewal, whatever came of it; 168 attempts before the old one ends."""


def needs_renewal(expires_at: float | None, now: float) -> bool:
    """Whether a certificate that ends at `expires_at` is to be replaced. One that ends later than any made now would
    was made by a clock that ran ahead, and may not have begun yet."""
    return expires_at is None or not LIFE_S / 2 < expires_at - now <= LIFE_S + SKEW_S


def renewal(ctx: ReconcileContext) -> tuple[list[RenewCertificate], float | None]:
    """The renewal of a running job's certificate, if one is due, and when the next one is."""
    name = names.role_secret_name(ctx.facts.name, Role.MANAGER)
    stored = next((one for one in ctx.facts.children if (one.kind, one.name) == ("Secret", name)), None)
    if stored is None or stored.deleting:
        return [], None
    tried_at = ctx.state.renewal_tried_at
    if tried_at is not None and 0 <= ctx.now - tried_at < RENEWAL_RETRY_S:
        return [], tried_at + RENEWAL_RETRY_S
    if not needs_renewal(stored.expires_at, ctx.now):
        return [], (stored.expires_at or ctx.now) - LIFE_S / 2
    root = names.keys_secret_name(ctx.facts.name)
    action = RenewCertificate(name, stored.uid, root=root, hosts=manager_hosts(ctx.owner), now=ctx.now)
    return [action], ctx.now + RENEWAL_RETRY_S
