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
Refuses to hold: deletions that we asked for (the caller knows them by their annotation), ends by own fault (`endings`),
and any doing (`fleet_plan`). Read next: `node_signs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from polyrl.cluster import names
from polyrl.cluster.observation.context import Look
from polyrl.cluster.observation.facts import PodFacts
from polyrl.cluster.observation.node_signals import Kind, Sign, node_signs
from polyrl.cluster.timestamps import unix
from polyrl.sample import Pool

_RANK: Final = (Kind.SPOT, Kind.LOST, Kind.DRAIN, Kind.EVICTION, Kind.DELETED, Kind.UNKNOWN)
"""The most telling kind first: an interrupted spot machine also evicts its pods and deletes them."""

SCHEDULER: Final = "PreemptionByScheduler"
"""DisruptionTarget's reason when a pod of higher priority took the place: the pool is short of room."""

_EVICTED_BY: Final = {
    SCHEDULER: Kind.EVICTION,
    "EvictionByEvictionAPI": Kind.EVICTION,
    "DeletionByTaintManager": Kind.DRAIN,
    "DeletionByPodGC": Kind.LOST,
    "TerminationByKubelet": Kind.EVICTION,
}
_SHUTDOWN: Final = ("Terminated", "NodeShutdown")
"""status.reason that a kubelet leaves when its machine shuts down."""


@dataclass(frozen=True)
class Notice:
    """A pod will be, or was, taken away. Times are Unix seconds."""

    kind: Kind
    at: float
    """When its first sign was seen, or happened as far as is known."""
    deadline: float
    """When the pod ends at the latest."""
    confirmed: bool
    """False: at risk, it may yet stay."""
    why: str


def notice_of(pod: PodFacts, look: Look, *, silent: bool = False, drains: bool = False) -> Notice | None:
    """The notice of `pod`, which we have not released. `silent`: the manager has lost its engine; `drains`: its agent
    hands over of its own accord, so it was told by its machine or by a signal."""
    signs = [*_pod_signs(pod), *node_signs(pod, look, silent=silent)]
    if drains:
        signs.append(Sign(Kind.UNKNOWN, True, why="its agent hands over"))
    told_at = unix(pod.annotations.get(names.ANNOTATION_NOTICED_AT))
    confirmed = [sign for sign in signs if sign.confirmed]
    if told_at is None and not signs:
        return None
    if told_at is None and not confirmed:
        first = signs[0]
        return Notice(first.kind, look.now, look.now + look.drain_s, confirmed=False, why=first.why)
    return _confirmed(pod, confirmed, told_at, look)


def _confirmed(pod: PodFacts, signs: list[Sign], told_at: float | None, look: Look) -> Notice:
    now = look.now
    signs = sorted(signs, key=lambda sign: _RANK.index(sign.kind))
    seen_at = now if told_at is None else told_at
    at = seen_at if told_at is not None else min([now, *(sign.at for sign in signs if sign.at is not None)])
    deadline = min([seen_at + look.drain_s, *(sign.deadline for sign in signs if sign.deadline is not None)])
    written = pod.annotations.get(names.ANNOTATION_NOTICE, "")
    kind = Kind(written) if written in {kind.value for kind in Kind} else signs[0].kind if signs else Kind.UNKNOWN
    return Notice(kind, at, deadline, True, signs[0].why if signs else "it was told to hand over")


def _pod_signs(pod: PodFacts) -> Iterator[Sign]:
    if pod.disruption:
        kind = _EVICTED_BY.get(pod.disruption, Kind.UNKNOWN)
        yield Sign(_if_shutdown(pod, kind), True, why=f"disruption target: {pod.disruption}")
    if pod.ended and pod.reason in (*_SHUTDOWN, "NodeLost", "Evicted", "Preempting"):
        kind = Kind.LOST if pod.reason == "NodeLost" else _if_shutdown(pod, Kind.EVICTION)
        yield Sign(kind, True, why=f"ended by the kubelet: {pod.reason}")
    if pod.deletion_at is not None:
        asked_at = pod.deletion_at - pod.deletion_grace_s
        yield Sign(Kind.DELETED, True, asked_at, pod.deletion_at, "somebody deleted the pod")


def _if_shutdown(pod: PodFacts, otherwise: Kind) -> Kind:
    if pod.reason not in _SHUTDOWN:
        return otherwise
    return Kind.SPOT if pod.pool is Pool.SPOT else Kind.DRAIN
