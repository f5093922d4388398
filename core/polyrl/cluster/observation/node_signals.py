"""What a node's taints, conditions and absence say about the pods on it.

Keys are those of Kubernetes, Karpenter, cluster-autoscaler, aws-node-termination-handler, GKE and AKS. One of AKS's is
the older name of another; clusters have either.
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
    """Why a pod is taken away, as the status names it."""

    SPOT = "SpotInterruption"
    DRAIN = "NodeDrain"
    EVICTION = "Eviction"
    LOST = "NodeLost"
    DELETED = "PodDeleted"
    UNKNOWN = "Unknown"


@dataclass(frozen=True)
class DisruptionSignal:
    """One sign. Times are Unix seconds, None where the sign does not say."""

    kind: DisruptionKind
    confirmed: bool
    at: float | None = None
    deadline: float | None = None
    why: str = ""


SHUTDOWN_S: Final = 15.0
"""Seconds that a kubelet gives ordinary pods once its machine shuts down, by GKE's and AKS's defaults."""

NODE_KNOWN_S: Final = 60.0
"""A node that a pod is bound to reaches our watch within that time, if it exists; timed by our own looks, as pods and
nodes come by different watches. One that was seen before and is not there now is gone at once."""

RENAMED_S: Final = 5.0
"""A node made so much later than its pod was bound is another machine under that name; stamps are whole seconds."""

SHUTTING_DOWN: Final = "shutting down"
"""In the message of a node's Ready condition."""

_INTERRUPTION: Final = frozenset(
    (
        "aws-node-termination-handler/spot-itn",
        "cloud.google.com/impending-node-termination",
        "remediator.kubernetes.azure.com/unschedulable",
        "remediator.aks.microsoft.com/unschedulable",
    )
)
"""The cloud takes the machine: an interruption on spot capacity, maintenance elsewhere."""

_DRAIN: Final = frozenset(
    (
        "ToBeDeletedByClusterAutoscaler",
        "aws-node-termination-handler/scheduled-maintenance",
        "aws-node-termination-handler/asg-lifecycle-termination",
    )
)
_AT_RISK: Final = frozenset(
    (
        "DeletionCandidateOfClusterAutoscaler",
        "aws-node-termination-handler/rebalance-recommendation",
        "node.kubernetes.io/unschedulable",
        "karpenter.sh/disrupted",
    )
)
"""Karpenter taints while it still looks for a replacement, and may take that back; a NodeClaim's deletion is final."""

_SUSPECT: Final = frozenset(("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"))
_OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"


def node_signals(pod: PodFacts, ctx: ReconcileContext, *, silent: bool) -> Iterator[DisruptionSignal]:
    """Signs of the pod's node. `silent`: the manager has lost the engine that runs there."""
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
    return any(sign.kind is DisruptionKind.LOST and sign.confirmed for sign in node_signals(pod, ctx, silent=False))


def is_dead(pod: PodFacts, ctx: ReconcileContext) -> bool:
    """True when no kubelet answers for the pod now: its node is gone, or has fallen silent."""
    node = ctx.facts.nodes.get(pod.node)
    return is_gone(pod, ctx) or (ctx.facts.sees_nodes and node is not None and _is_suspect(node))


def _lost(now: float, why: str) -> DisruptionSignal:
    return DisruptionSignal(DisruptionKind.LOST, True, deadline=now, why=why)


def _endings(pod: PodFacts, node: NodeFacts) -> Iterator[DisruptionSignal]:
    """The node, or what stands for it, is being deleted or shuts down."""
    kind = DisruptionKind.SPOT if pod.pool is Pool.SPOT and not node.claim_reason else DisruptionKind.DRAIN
    if node.claim_deletion_at is not None:
        message = f" ({node.claim_reason})" if node.claim_reason else ""
        yield DisruptionSignal(
            kind, True, node.claim_deletion_at, why=f"the NodeClaim of {node.name} is being deleted{message}"
        )
    elif node.deletion_at is not None:
        yield DisruptionSignal(kind, True, why=f"node {node.name} is being deleted")
    if not node.ready and SHUTTING_DOWN in node.ready_reason.lower():
        deadline = None if node.ready_changed_at is None else node.ready_changed_at + SHUTDOWN_S
        yield DisruptionSignal(kind, True, node.ready_changed_at, deadline, f"node {node.name} is shutting down")


def _of_taint(pod: PodFacts, taint: Taint, now: float) -> Iterator[DisruptionSignal]:
    why = f"taint {taint.key} on node {pod.node}"
    if taint.key in _INTERRUPTION:
        yield DisruptionSignal(
            DisruptionKind.SPOT if pod.pool is Pool.SPOT else DisruptionKind.DRAIN, True, taint.added_at, why=why
        )
    elif taint.key in _DRAIN:
        yield DisruptionSignal(DisruptionKind.DRAIN, True, taint.added_at, why=why)
    elif taint.key == _OUT_OF_SERVICE:
        yield _lost(now, why)
    elif taint.key in _AT_RISK:
        yield DisruptionSignal(DisruptionKind.DRAIN, False, taint.added_at, why=why)


def _is_suspect(node: NodeFacts) -> bool:
    shuts_down = SHUTTING_DOWN in node.ready_reason.lower()
    return (not node.ready and not shuts_down) or any(taint.key in _SUSPECT for taint in node.taints)


def _doubts(node: NodeFacts, now: float, *, silent: bool) -> Iterator[DisruptionSignal]:
    if _is_suspect(node):
        why = f"node {node.name} is not ready" + (" and the manager has lost its engine" if silent else "")
        yield DisruptionSignal(DisruptionKind.LOST, silent, node.ready_changed_at, now if silent else None, why)
    if node.unschedulable:
        yield DisruptionSignal(DisruptionKind.DRAIN, False, why=f"node {node.name} is cordoned")
