"""Raw nodes and Karpenter NodeClaims to facts. Read next: `disruption`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from polyrl.cluster.observation import raw
from polyrl.cluster.observation.facts import NodeFacts, Taint
from polyrl.cluster.observation.raw import NOTHING, Raw
from polyrl.cluster.timestamps import unix

DISRUPTED_BY_CHOICE: Final = "DisruptionReason"
"""Condition of a NodeClaim that Karpenter ends of its own accord; its reason says Drifted, Underutilized, Empty."""


def node_facts(nodes: Mapping[str, Raw], claims: Mapping[str, Raw], wanted: Iterable[str]) -> dict[str, NodeFacts]:
    """Facts of those of the `wanted` nodes that exist. `claims` may be empty: not every cluster has Karpenter."""
    by_node = {raw.text(claim, "status", "nodeName"): claim for claim in claims.values()}
    return {name: _node(nodes[name], by_node.get(name, NOTHING)) for name in set(wanted) if name in nodes}


def _node(node: Raw, claim: Raw) -> NodeFacts:
    ready = raw.condition(node, "Ready")
    message = ": ".join(filter(None, (raw.text(ready, "reason"), raw.text(ready, "message"))))
    return NodeFacts(
        name=raw.text(node, "metadata", "name"),
        uid=raw.text(node, "metadata", "uid"),
        created_at=unix(raw.text(node, "metadata", "creationTimestamp")) or 0.0,
        ready=raw.holds(ready) or not ready,
        ready_reason="" if raw.holds(ready) else message,
        ready_changed_at=unix(raw.text(ready, "lastTransitionTime")),
        unschedulable=raw.flag(node, "spec", "unschedulable"),
        taints=tuple(_taint(taint) for taint in raw.parts(node, "spec", "taints")),
        deletion_at=unix(raw.text(node, "metadata", "deletionTimestamp")),
        claim_deletion_at=unix(raw.text(claim, "metadata", "deletionTimestamp")),
        claim_reason=_claim_reason(claim),
    )


def _taint(taint: Raw) -> Taint:
    return Taint(
        raw.text(taint, "key"), raw.text(taint, "value"), raw.text(taint, "effect"), unix(raw.text(taint, "timeAdded"))
    )


def _claim_reason(claim: Raw) -> str:
    chosen = raw.condition(claim, DISRUPTED_BY_CHOICE)
    return raw.text(chosen, "reason") if raw.holds(chosen) else ""
