"""All signs that a pod will be, or was, taken away, united into one notice per pod.

    sign                                              notice
    pod is being deleted, DisruptionTarget            confirmed
    node or its NodeClaim is being deleted            confirmed
    node is shutting down, out of service, gone       confirmed
    taint of a termination (spot-itn, ToBeDeleted...) confirmed
    its agent hands over: it got a signal or a notice confirmed
    node not ready or unreachable                     at risk; confirmed once the manager has lost the engine as well
    cordon, rebalance, candidate, disrupted taint     at risk: no replacement, first victim

A confirmed notice is written on the pod, and stays although the sign may go: the engine was told to hand its work over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from polyrl.cluster import names
from polyrl.cluster.observation.context import ReconcileContext
from polyrl.cluster.observation.facts import PodFacts
from polyrl.cluster.observation.node_signals import DisruptionKind, DisruptionSignal, node_signals
from polyrl.cluster.timestamps import unix
from polyrl.sample import Pool

_RANK: Final = (
    DisruptionKind.SPOT,
    DisruptionKind.LOST,
    DisruptionKind.DRAIN,
    DisruptionKind.EVICTION,
    DisruptionKind.DELETED,
    DisruptionKind.UNKNOWN,
)
"""The most telling kind first: an interrupted spot machine also evicts its pods and deletes them."""

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
    """When its first sign was seen, or happened as far as is known."""
    deadline: float
    """When the pod ends at the latest."""
    confirmed: bool
    """False: at risk, it may yet stay."""
    why: str


def notice_of(
    pod: PodFacts, ctx: ReconcileContext, *, silent: bool = False, drains: bool = False
) -> DisruptionNotice | None:
    """The notice of `pod`, which we have not released. `silent`: the manager has lost its engine; `drains`: its agent
    hands over of its own accord, so it was told by its machine or by a signal."""
    signs = [*_pod_signs(pod), *node_signals(pod, ctx, silent=silent)]
    if drains:
        signs.append(DisruptionSignal(DisruptionKind.UNKNOWN, True, why="its agent hands over"))
    told_at = unix(pod.annotations.get(names.ANNOTATION_NOTICED_AT))
    confirmed = [sign for sign in signs if sign.confirmed]
    if told_at is None and not signs:
        return None
    if told_at is None and not confirmed:
        first = signs[0]
        return DisruptionNotice(first.kind, ctx.now, ctx.now + ctx.drain_s, confirmed=False, why=first.why)
    return _confirmed(pod, confirmed, told_at, ctx)


def _confirmed(
    pod: PodFacts, signs: list[DisruptionSignal], told_at: float | None, ctx: ReconcileContext
) -> DisruptionNotice:
    now = ctx.now
    signs = sorted(signs, key=lambda sign: _RANK.index(sign.kind))
    seen_at = now if told_at is None else told_at
    at = seen_at if told_at is not None else min([now, *(sign.at for sign in signs if sign.at is not None)])
    deadline = min([seen_at + ctx.drain_s, *(sign.deadline for sign in signs if sign.deadline is not None)])
    written = pod.annotations.get(names.ANNOTATION_NOTICE, "")
    kind = (
        DisruptionKind(written)
        if written in {kind.value for kind in DisruptionKind}
        else signs[0].kind
        if signs
        else DisruptionKind.UNKNOWN
    )
    return DisruptionNotice(kind, at, deadline, True, signs[0].why if signs else "it was told to hand over")


def _pod_signs(pod: PodFacts) -> Iterator[DisruptionSignal]:
    if pod.disruption:
        kind = _EVICTED_BY.get(pod.disruption, DisruptionKind.UNKNOWN)
        yield DisruptionSignal(_if_shutdown(pod, kind), True, why=f"disruption target: {pod.disruption}")
    if pod.ended and pod.reason in (*_SHUTDOWN, "NodeLost", "Evicted", "Preempting"):
        kind = DisruptionKind.LOST if pod.reason == "NodeLost" else _if_shutdown(pod, DisruptionKind.EVICTION)
        yield DisruptionSignal(kind, True, why=f"ended by the kubelet: {pod.reason}")
    if pod.deletion_at is not None:
        dry_run_at = pod.deletion_at - pod.deletion_grace_s
        yield DisruptionSignal(DisruptionKind.DELETED, True, dry_run_at, pod.deletion_at, "somebody deleted the pod")


def _if_shutdown(pod: PodFacts, otherwise: DisruptionKind) -> DisruptionKind:
    if pod.reason not in _SHUTDOWN:
        return otherwise
    return DisruptionKind.SPOT if pod.pool is Pool.SPOT else DisruptionKind.DRAIN
