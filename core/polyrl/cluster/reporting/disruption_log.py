"""The last few rollouts that were taken away, each listed once and closed when its pod is gone.

Refuses to hold: how many there were in all (see `counting`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from polyrl.cluster import names
from polyrl.cluster.observation.exactly_once import LossCounter, parse_loss_number
from polyrl.cluster.observation.facts import PodFacts
from polyrl.cluster.observation.node_signals import DisruptionKind
from polyrl.cluster.reporting.assessment import Assessment
from polyrl.cluster.state import LastSeenPod
from polyrl.cluster.timestamps import millisecond, unix
from polyrl.manifest.status import Disruption

MOST: Final = 10
"""Entries kept; events and metrics tell of the others."""

_KINDS: Final = {kind.value for kind in DisruptionKind}


def recent(assessment: Assessment) -> list[Disruption]:
    """Newest last."""
    now, there = assessment.ctx.now, {pod.uid: pod for pod in assessment.ctx.facts.pods}
    known = [_closed(entry, there, now) for entry in assessment.ctx.status.recent_disruptions]
    listed = {entry.pod_uid for entry in known}
    loss_number = [_closed(_entry(pod, now), there, now) for pod in assessment.preempted if pod.uid not in listed]
    at = millisecond(now)
    vanished = [
        Disruption.model_validate(
            {"podName": pod.name, "podUID": uid, "nodeName": pod.node, "noticeTime": at, "deleteTime": at}
            | {"reason": DisruptionKind.DELETED.value}
        )
        for uid, pod in assessment.ctx.state.last_seen.items()
        if pod in assessment.vanished and is_loss(pod) and uid not in listed
    ]
    return [*known, *loss_number, *vanished][-MOST:]


def is_loss(pod: LastSeenPod) -> bool:
    """A pod that vanished was taken, unless it had been found to have failed."""
    loss_number = parse_loss_number(pod.loss_number)
    return loss_number is None or loss_number.counter is LossCounter.PREEMPTION


def _entry(pod: PodFacts, now: float) -> Disruption:
    kind = pod.annotations.get(names.ANNOTATION_NOTICE, "")
    noticed_at = unix(pod.annotations.get(names.ANNOTATION_NOTICED_AT))
    return Disruption.model_validate(
        {
            "podName": pod.name,
            "podUID": pod.uid,
            "nodeName": pod.node,
            "reason": kind if kind in _KINDS else DisruptionKind.UNKNOWN.value,
            "noticeTime": millisecond(now if noticed_at is None else noticed_at),
        }
    )


def _closed(entry: Disruption, there: Mapping[str, PodFacts], now: float) -> Disruption:
    """With the time of its end, once the pod has ended or is gone."""
    pod = there.get(entry.pod_uid)
    if entry.delete_time is not None or (pod is not None and not pod.ended):
        return entry
    noticed_at = unix(entry.notice_time)
    millis = 0 if noticed_at is None else max(0, round((now - noticed_at) * 1000))
    return entry.model_copy(update={"delete_time": millisecond(now), "notice_millis": millis})
