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
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from polyrl.cluster import names
from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.facts import PodFacts
from polyrl.cluster.observation.node_signals import DisruptionKind, DisruptionSignal, node_signals, spot_or_drain
from polyrl.cluster.timestamps import unix

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
    """As annotated on the pod when its notice was confirmed; None when it was not."""
    kind = pod.annotations.get(names.ANNOTATION_NOTICE, "")
    return DisruptionKind(kind) if kind in {known.value for known in DisruptionKind} else None


def _confirmed(
    pod: PodFacts, signals: list[DisruptionSignal], noticed_at: float | None, ctx: ReconcileContext
) -> DisruptionNotice:
    # In the order of the kinds: an interrupted spot machine also evicts its pods and deletes them.
    signals = sorted(signals, key=lambda signal: list(DisruptionKind).index(signal.kind))
    kind, why = (signals[0].kind, signals[0].why) if signals else (DisruptionKind.UNKNOWN, "it was asked to hand over")
    at = noticed_at
    if at is None:
        at = min([ctx.now, *(signal.at for signal in signals if signal.at is not None)])
    latest = (ctx.now if noticed_at is None else noticed_at) + ctx.drain_s
    deadline = min([latest, *(signal.deadline for signal in signals if signal.deadline is not None)])
    return DisruptionNotice(disruption_kind(pod) or kind, at, deadline=deadline, confirmed=True, why=why)


def _pod_signals(pod: PodFacts) -> Iterator[DisruptionSignal]:
    if pod.disruption:
        kind = _EVICTED_BY.get(pod.disruption, DisruptionKind.UNKNOWN)
        yield DisruptionSignal(_if_shutdown(pod, kind), True, why=f"disruption target: {pod.disruption}")
    if pod.ended and pod.reason in (*_SHUTDOWN, "NodeLost", "Evicted", "Preempting"):
        kind = DisruptionKind.LOST if pod.reason == "NodeLost" else _if_shutdown(pod, DisruptionKind.EVICTION)
        yield DisruptionSignal(kind, True, why=f"ended by the kubelet: {pod.reason}")
    if pod.deletion_at is not None:
        requested_at = pod.deletion_at - pod.deletion_grace_s
        why = "somebody deleted the pod"
        yield DisruptionSignal(DisruptionKind.DELETED, True, at=requested_at, deadline=pod.deletion_at, why=why)


def _if_shutdown(pod: PodFacts, otherwise: DisruptionKind) -> DisruptionKind:
    return spot_or_drain(pod) if pod.reason in _SHUTDOWN else otherwise
