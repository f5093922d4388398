"""All signals that a pod will be, or was, taken away, united into one notice per pod.

    signal                                            notice
    pod is being deleted, DisruptionTarget            confirmed
    node or its NodeClaim is being deleted            confirmed
    node is shutting down, out of service, gone       confirmed
    taint of a termination (spot-itn, ToBeDeleted...) confirmed
    its agent hands over: it got a signal or a notice confirmed
    node not ready or unreachable                     at risk; confirmed once the manager has lost the engine as well
    cordon, rebalance, candidate, disrupted taint     at risk: no replacement, first victim

A confirmed notice is written on the pod, and stays although the signal may go: the engine was asked to hand its work
over. Deletions that we asked for are none (the caller knows them by their annotation), nor are a pod's own failures.
Keys of taints are those of Kubernetes, Karpenter, cluster-autoscaler, aws-node-termination-handler, GKE and AKS. AKS
renamed one of its keys, and a cluster may have the older or the newer name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from polyrl.cluster import names
from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.facts import NodeFacts, PodFacts, Taint
from polyrl.cluster.timestamps import unix
from polyrl.manifest.status import DisruptionKind
from polyrl.sample import Pool


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
and nodes come by different watches, and from each pod's binding: pods that follow each other on a node that no list has
were made three a second. One that was seen before and is not there now is gone at once, but for pods that came later:
they are on the next machine of that name."""

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
    since = ctx.state.absent_since.get(pod.node, ctx.now)
    if pod.node in ctx.state.nodes and (pod.scheduled_at or since) <= since:
        return ctx.now
    return max(since, pod.scheduled_at or since) + NODE_KNOWN_S


def is_gone(pod: PodFacts, ctx: ReconcileContext) -> bool:
    """True when the machine cannot come back with the pod running: it is gone, or declared out of service."""
    signals = node_signals(pod, ctx, silent=False)
    return any(signal.kind is DisruptionKind.LOST and signal.confirmed for signal in signals)


def is_dead(pod: PodFacts, ctx: ReconcileContext) -> bool:
    """True when no kubelet answers for the pod now: its node is gone, or has fallen silent."""
    node = ctx.facts.nodes.get(pod.node)
    return is_gone(pod, ctx) or (ctx.facts.sees_nodes and node is not None and _is_suspect(node))


def spot_or_drain(pod: PodFacts) -> DisruptionKind:
    """Disruption reason to report when the cloud reclaims this machine."""
    return DisruptionKind.SPOT if pod.pool is Pool.SPOT else DisruptionKind.DRAIN


def _lost(now: float, why: str) -> DisruptionSignal:
    return DisruptionSignal(DisruptionKind.LOST, True, deadline=now, why=why)


def _endings(pod: PodFacts, node: NodeFacts) -> Iterator[DisruptionSignal]:
    """The node, or what stands for it, is being deleted or shuts down."""
    claim = node.claim
    kind = DisruptionKind.DRAIN if claim is not None and claim.reason else spot_or_drain(pod)
    if claim is not None and claim.deletion_at is not None:
        chosen = f" ({claim.reason})" if claim.reason else ""
        why = f"the NodeClaim of {node.name} is being deleted{chosen}"
        yield DisruptionSignal(kind, True, at=claim.deletion_at, why=why)
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


SCHEDULER: Final = "PreemptionByScheduler"
"""DisruptionTarget's reason when a pod of higher priority took the place: the pool is short of room."""

_EVICTED_BY: Final = {
    SCHEDULER: DisruptionKind.EVICTION,
    "EvictionByEvictionAPI": DisruptionKind.EVICTION,
    "DeletionByTaintManager": DisruptionKind.DRAIN,
    "DeletionByPodGC": DisruptionKind.LOST,
    "TerminationByKubelet": DisruptionKind.EVICTION,
}
_SHUTDOWN: Final = ("Terminated", "NodeShutdown")
"""status.reason that a kubelet leaves when its machine shuts down."""


@dataclass(frozen=True)
class DisruptionNotice:
    """A pod will be, or was, taken away. Times are Unix seconds."""

    kind: DisruptionKind
    at: float
    """When its first signal was seen, or happened as far as is known."""
    deadline: float
    """When the pod ends at the latest."""
    confirmed: bool
    """False: at risk, it may yet stay."""
    why: str


def notice_of(
    pod: PodFacts, ctx: ReconcileContext, *, silent: bool = False, drains: bool = False
) -> DisruptionNotice | None:
    """The notice of `pod`, which we have not released. `silent`: the manager has lost its engine; `drains`: its agent
    hands over of its own accord, so its machine or a signal asked it to."""
    signals = [*_pod_signals(pod), *node_signals(pod, ctx, silent=silent)]
    if drains:
        signals.append(DisruptionSignal(DisruptionKind.UNKNOWN, True, why="its agent hands over"))
    noticed_at = unix(pod.annotations.get(names.ANNOTATION_NOTICED_AT))
    confirmed = [signal for signal in signals if signal.confirmed]
    if confirmed or noticed_at is not None:
        return _confirmed(pod, confirmed, noticed_at, ctx)
    if not signals:
        return None
    deadline = ctx.now + ctx.drain_s
    return DisruptionNotice(signals[0].kind, ctx.now, deadline=deadline, confirmed=False, why=signals[0].why)


def disruption_kind(pod: PodFacts) -> DisruptionKind | None:
    """The kind annotated on the pod when its notice was confirmed; None when it was not."""
    kind = pod.annotations.get(names.ANNOTATION_NOTICE, "")
    return DisruptionKind(kind) if kind in {known.value for known in DisruptionKind} else None


def _confirmed(
    pod: PodFacts, signals: list[DisruptionSignal], noticed_at: float | None, ctx: ReconcileContext
) -> DisruptionNotice:
    # In the order of the kinds: an interrupted spot machine also evicts its pods and deletes them.
    signals = sorted(signals, key=lambda signal: list(DisruptionKind).index(signal.kind))
    kind, why = (signals[0].kind, signals[0].why) if signals else (DisruptionKind.UNKNOWN, "it was asked to hand over")
    first_at = min([ctx.now, *(signal.at for signal in signals if signal.at is not None)])
    at = first_at if noticed_at is None else noticed_at
    latest = (ctx.now if noticed_at is None else noticed_at) + ctx.drain_s
    deadline = min([latest, *(signal.deadline for signal in signals if signal.deadline is not None)])
    return DisruptionNotice(disruption_kind(pod) or kind, at, deadline=deadline, confirmed=True, why=why)


def _pod_signals(pod: PodFacts) -> Iterator[DisruptionSignal]:
    if pod.disruption:
        kind = _EVICTED_BY.get(pod.disruption, DisruptionKind.UNKNOWN)
        yield DisruptionSignal(_if_shutdown(pod, kind), True, why=f"disruption target: {pod.disruption}")
    # `Evicted` without a DisruptionTarget is the pod's own fault: it wrote more than its volumes may hold.
    if pod.ended and pod.reason in (*_SHUTDOWN, "NodeLost", "Preempting"):
        kind = DisruptionKind.LOST if pod.reason == "NodeLost" else _if_shutdown(pod, DisruptionKind.EVICTION)
        yield DisruptionSignal(kind, True, why=f"ended by the kubelet: {pod.reason}")
    if pod.deletion_at is not None:
        requested_at = pod.deletion_at - pod.deletion_grace_s
        why = "somebody deleted the pod"
        yield DisruptionSignal(DisruptionKind.DELETED, True, at=requested_at, deadline=pod.deletion_at, why=why)


def _if_shutdown(pod: PodFacts, otherwise: DisruptionKind) -> DisruptionKind:
    return spot_or_drain(pod) if pod.reason in _SHUTDOWN else otherwise
