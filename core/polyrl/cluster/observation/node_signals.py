"""What a node's taints, conditions and absence say about the pods on it.

Keys are those of Kubernetes, Karpenter, cluster-autoscaler, aws-node-termination-handler, GKE and AKS. AKS renamed one
of its keys, and a cluster may have the older or the newer name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.facts import NodeFacts, PodFacts, Taint
from polyrl.sample import Pool


class DisruptionKind(StrEnum):
    """Why a pod is taken away, as the status names it: the most telling first."""

    SPOT = "SpotInterruption"
    """The cloud takes a spot machine back."""
    LOST = "NodeLost"
    """The machine is gone, or nothing on it answers any more."""
    DRAIN = "NodeDrain"
    """The machine is being emptied: an autoscaler, maintenance, a shutdown."""
    EVICTION = "Eviction"
    """The pod was evicted, or made room for one of higher priority."""
    DELETED = "PodDeleted"
    """Somebody other than us deleted the pod."""
    UNKNOWN = "Unknown"


@dataclass(frozen=True)
class DisruptionSignal:
    """One signal. Times are Unix seconds, None where it does not say."""

    kind: DisruptionKind
    confirmed: bool
    at: float | None = None
    deadline: float | None = None
    why: str = ""


SHUTDOWN_S: Final = 15.0
"""Seconds that a kubelet gives ordinary pods once its machine shuts down, by GKE's and AKS's defaults."""

NODE_KNOWN_S: Final = 60.0
"""A node that a pod is bound to reaches our watch within that time, if it exists; timed by our own reconciles, as pods
and nodes come by different watches. One that was seen before and is not there now is gone at once."""

RENAMED_S: Final = 5.0
"""A node made so much later than its pod was bound is another machine under that name; timestamps are whole seconds."""

SHUTTING_DOWN: Final = "shutting down"
"""In the message of a node's Ready condition."""

_SUSPECT: Final = frozenset({"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"})

_TAINTS: Final = {
    "aws-node-termination-handler/spot-itn": (DisruptionKind.SPOT, True),
    "cloud.google.com/impending-node-termination": (DisruptionKind.SPOT, True),
    "remediator.kubernetes.azure.com/unschedulable": (DisruptionKind.SPOT, True),
    "remediator.aks.microsoft.com/unschedulable": (DisruptionKind.SPOT, True),
    "ToBeDeletedByClusterAutoscaler": (DisruptionKind.DRAIN, True),
    "aws-node-termination-handler/scheduled-maintenance": (DisruptionKind.DRAIN, True),
    "aws-node-termination-handler/asg-lifecycle-termination": (DisruptionKind.DRAIN, True),
    "node.kubernetes.io/out-of-service": (DisruptionKind.LOST, True),
    "DeletionCandidateOfClusterAutoscaler": (DisruptionKind.DRAIN, False),
    "aws-node-termination-handler/rebalance-recommendation": (DisruptionKind.DRAIN, False),
    "node.kubernetes.io/unschedulable": (DisruptionKind.DRAIN, False),
    "karpenter.sh/disrupted": (DisruptionKind.DRAIN, False),
}
"""By key: the kind, and whether it is confirmed. SPOT is an interruption on spot capacity and maintenance elsewhere.
Karpenter taints while it still looks for a replacement, and may take that back; a NodeClaim's deletion is final."""


def node_signals(pod: PodFacts, ctx: ReconcileContext, *, silent: bool) -> Iterator[DisruptionSignal]:
    """Signals of the pod's node. `silent`: the manager has lost the engine that runs there."""
    now = ctx.now
    if not pod.node or not ctx.facts.sees_nodes:
        return
    node = ctx.facts.nodes.get(pod.node)
    if node is None:
        due = absence_due(pod, ctx)
        if due is not None and now >= due:
            yield _lost(now, f"node {pod.node} is gone")
        return
    if pod.scheduled_at is not None and node.created_at > pod.scheduled_at + RENAMED_S:
        yield _lost(now, f"node {pod.node} is another machine by now")
        return
    yield from _endings(pod, node)
    for taint in node.taints:
        yield from _of_taint(pod, taint, now)
    yield from _doubts(node, now, silent=silent)


def absence_due(pod: PodFacts, ctx: ReconcileContext) -> float | None:
    """When the absence of the pod's node means that it is gone; None when it is there, or cannot be seen."""
    if not pod.node or not ctx.facts.sees_nodes or pod.node in ctx.facts.nodes:
        return None
    if pod.node in ctx.state.nodes:
        return ctx.now
    return ctx.state.absent_since.get(pod.node, ctx.now) + NODE_KNOWN_S


def is_gone(pod: PodFacts, ctx: ReconcileContext) -> bool:
    """True when the machine cannot come back with the pod running: it is gone, or declared out of service."""
    return any(
        signal.kind is DisruptionKind.LOST and signal.confirmed for signal in node_signals(pod, ctx, silent=False)
    )


def is_dead(pod: PodFacts, ctx: ReconcileContext) -> bool:
    """True when no kubelet answers for the pod now: its node is gone, or has fallen silent."""
    node = ctx.facts.nodes.get(pod.node)
    return is_gone(pod, ctx) or (ctx.facts.sees_nodes and node is not None and _is_suspect(node))


def spot_or_drain(pod: PodFacts) -> DisruptionKind:
    """What it is called when the cloud takes the pod's machine."""
    return DisruptionKind.SPOT if pod.pool is Pool.SPOT else DisruptionKind.DRAIN


def _lost(now: float, why: str) -> DisruptionSignal:
    return DisruptionSignal(DisruptionKind.LOST, True, deadline=now, why=why)


def _endings(pod: PodFacts, node: NodeFacts) -> Iterator[DisruptionSignal]:
    """The node, or what stands for it, is being deleted or shuts down."""
    kind = DisruptionKind.DRAIN if node.claim_reason else spot_or_drain(pod)
    if node.claim_deletion_at is not None:
        why = f"the NodeClaim of {node.name} is being deleted" + (
            f" ({node.claim_reason})" if node.claim_reason else ""
        )
        yield DisruptionSignal(kind, True, at=node.claim_deletion_at, why=why)
    elif node.deletion_at is not None:
        yield DisruptionSignal(kind, True, why=f"node {node.name} is being deleted")
    if _shuts_down(node):
        since = node.ready_changed_at
        deadline = None if since is None else since + SHUTDOWN_S
        yield DisruptionSignal(kind, True, at=since, deadline=deadline, why=f"node {node.name} is shutting down")


def _of_taint(pod: PodFacts, taint: Taint, now: float) -> Iterator[DisruptionSignal]:
    if taint.key not in _TAINTS:
        return
    kind, confirmed = _TAINTS[taint.key]
    why = f"taint {taint.key} on node {pod.node}"
    if kind is DisruptionKind.LOST:
        yield _lost(now, why)
    else:
        kind = spot_or_drain(pod) if kind is DisruptionKind.SPOT else kind
        yield DisruptionSignal(kind, confirmed, at=taint.added_at, why=why)


def _shuts_down(node: NodeFacts) -> bool:
    return not node.ready and SHUTTING_DOWN in node.ready_reason.lower()


def _is_suspect(node: NodeFacts) -> bool:
    return (not node.ready and not _shuts_down(node)) or any(taint.key in _SUSPECT for taint in node.taints)


def _doubts(node: NodeFacts, now: float, *, silent: bool) -> Iterator[DisruptionSignal]:
    if _is_suspect(node):
        why = f"node {node.name} is not ready" + (" and the manager has lost its engine" if silent else "")
        deadline = now if silent else None
        yield DisruptionSignal(DisruptionKind.LOST, silent, at=node.ready_changed_at, deadline=deadline, why=why)
    if node.unschedulable:
        yield DisruptionSignal(DisruptionKind.DRAIN, False, why=f"node {node.name} is cordoned")
