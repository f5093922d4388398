"""Raw pods to facts: a pure function of one object, so that whoever caches pods can cache the facts themselves."""

from __future__ import annotations

from typing import Final

from polyrl.cluster import names
from polyrl.cluster.observation import raw
from polyrl.cluster.observation.facts import Exit, PodFacts, PodPhase
from polyrl.cluster.observation.raw import Raw
from polyrl.cluster.timestamps import unix
from polyrl.sample import Pool
from polyrl.worker import Role

_ROLES: Final = {role.value: role for role in (Role.MANAGER, Role.TRAINER, Role.ROLLOUT)}
_POOLS: Final = {pool.value: pool for pool in (Pool.SPOT, Pool.ON_DEMAND)}
_PHASES: Final = {phase.value: phase for phase in PodPhase}
_OURS: Final = f"{names.GROUP}/"
_NONE: Final[dict[str, str]] = {}
"""Shared by all pods without annotations of ours."""


def pod_facts(pod: Raw) -> PodFacts | None:
    """Facts of one pod; None when its labels name no role of ours."""
    labels = raw.part(pod, "metadata", "labels")
    role = _ROLES.get(raw.text(labels, names.LABEL_ROLE))
    if role is None:
        return None
    created_at = unix(raw.text(pod, "metadata", "creationTimestamp")) or 0.0
    disrupted, ready = raw.condition(pod, "DisruptionTarget"), raw.condition(pod, "Ready")
    return PodFacts(
        name=raw.text(pod, "metadata", "name"),
        uid=raw.text(pod, "metadata", "uid"),
        role=role,
        phase=_PHASES.get(raw.text(pod, "status", "phase"), PodPhase.PENDING),
        created_at=created_at,
        pool=_POOLS.get(raw.text(labels, names.LABEL_POOL)),
        node=raw.text(pod, "spec", "nodeName"),
        ip=raw.text(pod, "status", "podIP"),
        ready=raw.holds(ready),
        scheduled_at=_scheduled_at(pod, created_at),
        unschedulable=_unschedulable(pod),
        deletion_at=unix(raw.text(pod, "metadata", "deletionTimestamp")),
        deletion_grace_s=float(raw.count(pod, "metadata", "deletionGracePeriodSeconds")),
        disruption=raw.text(disrupted, "reason") or "Unknown" if raw.holds(disrupted) else "",
        reason=raw.text(pod, "status", "reason"),
        exits=_exits(pod),
        ended_at=_ended_at(pod),
        template_hash=raw.text(labels, names.LABEL_TEMPLATE),
        annotations=_annotations(pod),
    )


def _scheduled_at(pod: Raw, created_at: float) -> float | None:
    """A pod that names its node was scheduled, even if nobody wrote the condition (static binding, kwok)."""
    scheduled = raw.condition(pod, "PodScheduled")
    if raw.holds(scheduled):
        return unix(raw.text(scheduled, "lastTransitionTime")) or created_at
    return created_at if raw.text(pod, "spec", "nodeName") else None


def _unschedulable(pod: Raw) -> str:
    scheduled = raw.condition(pod, "PodScheduled")
    refused = raw.text(scheduled, "status") == "False" and raw.text(scheduled, "reason") == "Unschedulable"
    return raw.text(scheduled, "message") or "Unschedulable" if refused else ""


def _exits(pod: Raw) -> tuple[Exit, ...]:
    """A container that is started again has not ended for good."""
    if raw.text(pod, "spec", "restartPolicy") != "Never" and raw.text(pod, "status", "phase") not in (
        PodPhase.SUCCEEDED,
        PodPhase.FAILED,
    ):
        return ()
    return tuple(Exit(name, raw.count(end, "exitCode"), raw.text(end, "reason")) for name, end in _terminated(pod))


def _ended_at(pod: Raw) -> float | None:
    timestamps = [unix(raw.text(end, "finishedAt")) for _, end in _terminated(pod)]
    return max((at for at in timestamps if at is not None), default=None)


def _terminated(pod: Raw) -> list[tuple[str, Raw]]:
    statuses = raw.parts(pod, "status", "containerStatuses") + raw.parts(pod, "status", "initContainerStatuses")
    states = [(raw.text(status, "name"), raw.part(status, "state", "terminated")) for status in statuses]
    return [(name, end) for name, end in states if end]


def _annotations(pod: Raw) -> dict[str, str]:
    written = raw.part(pod, "metadata", "annotations")
    ours = {key: value for key, value in written.items() if key.startswith(_OURS) and isinstance(value, str)}
    return ours or _NONE
