"""Raw objects, as the API server gives them, to facts of one job. Any field may be missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Final

from pydantic import ValidationError

from polyrl.cluster import names
from polyrl.cluster.observation import raw
from polyrl.cluster.observation.facts import (
    ChildFacts,
    ClaimFacts,
    Exit,
    JobFacts,
    ManagerFacts,
    NodeFacts,
    PodFacts,
    PodPhase,
    Taint,
    TrainerFacts,
)
from polyrl.cluster.observation.raw import Raw
from polyrl.cluster.timestamps import unix
from polyrl.manifest.job import PolyRLJob, remove_field
from polyrl.manifest.spec import OPERATOR
from polyrl.manifest.status import JobStatus
from polyrl.sample import Pool
from polyrl.worker import Role

UNREADABLE: Final = "unreadable"
"""Field of a job that was too large or too deep to be read: the sentence that says so. It has no spec then."""

MAX_FAULTS: Final = 5
"""Faults, or unknown fields, of a manifest named in one sentence; a person mends a few at a time."""


def job_facts(
    raw_job: Raw,
    *,
    pods: Iterable[PodFacts],
    trainer: TrainerFacts | None,
    nodes: Mapping[str, NodeFacts] | None,
    claims: Iterable[ClaimFacts],
    children: Iterable[ChildFacts],
    manager: ManagerFacts | None,
    dry_run: str | None,
) -> JobFacts:
    """Facts of one job. `pods` and `children` are those with its label, `nodes` those of the cluster by name (None when
    the operator may not watch nodes), `claims` the Karpenter NodeClaims of these, and perhaps of others."""
    seen = sorted(pods, key=lambda pod: (pod.created_at, pod.name))
    job, refusal, unknown = _job(raw_job)
    return JobFacts(
        name=raw.text(raw_job, "metadata", "name"),
        namespace=raw.text(raw_job, "metadata", "namespace"),
        uid=raw.text(raw_job, "metadata", "uid"),
        generation=raw.count(raw_job, "metadata", "generation"),
        job=job,
        status=_status(raw_job),
        refusal=refusal,
        unknown=unknown,
        managed_by=raw.text(raw_job, "spec", "managedBy") or OPERATOR,
        deleting="deletionTimestamp" in raw.part(raw_job, "metadata"),
        trainer=trainer,
        pods=tuple(seen),
        nodes=_with_claims(nodes or {}, claims, (pod.node for pod in seen if pod.node)),
        sees_nodes=nodes is not None,
        children=tuple(children),
        manager=manager,
        dry_run=dry_run,
    )


def _job(raw_job: Raw) -> tuple[PolyRLJob | None, str, tuple[str, ...]]:
    """The job, or the sentence that says why it is none; and fields that this version does not know. The API server
    prunes what its CRD does not know, so these are a later one's, which is upgraded first and fills in its defaults."""
    if unreadable := raw.text(raw_job, UNREADABLE):
        return None, unreadable, ()
    given = {key: value for key, value in raw_job.items() if key != "status"}
    unknown: list[str] = []
    while True:
        try:
            return PolyRLJob.model_validate(given), "", tuple(unknown[:MAX_FAULTS])
        except ValidationError as error:
            faults = error.errors()
        paths = [".".join(map(str, fault["loc"])) for fault in faults]
        kinds = {path: fault["type"] for path, fault in zip(paths, faults, strict=True)}
        extra = [path for path, kind in kinds.items() if kind == "extra_forbidden" and path not in unknown]
        if not extra:
            sentences = [f"{path}: {fault['msg']}" for path, fault in zip(paths, faults, strict=True)]
            return None, "; ".join(sentences[:MAX_FAULTS]), ()
        given, unknown = deepcopy(given), unknown + extra
        for path, fault in zip(paths, faults, strict=True):
            if path in extra:
                remove_field(given, fault["loc"])


def _status(raw_job: Raw) -> JobStatus:
    """As stored; one that cannot be read is rebuilt from nothing, as everything in it can be."""
    try:
        return JobStatus.model_validate(dict(raw.part(raw_job, "status")))
    except ValidationError:
        return JobStatus()


_ROLES: Final = {role.value: role for role in (Role.MANAGER, Role.TRAINER, Role.ROLLOUT)}
_POOLS: Final = {pool.value: pool for pool in (Pool.SPOT, Pool.ON_DEMAND)}
_PHASES: Final = {phase.value: phase for phase in PodPhase}
_READ: Final = (
    *(names.ANNOTATION_NOTICED_AT, names.ANNOTATION_NOTICE),
    *(names.ANNOTATION_COUNTED, names.ANNOTATION_RELEASED),
)
_READ_LENGTH: Final = 256
"""Characters of an annotation that are kept. Ours are shorter; whoever makes pods or ConfigMaps of his own may write
256 KiB on each, and all with our label are kept."""
_NONE: Final[dict[str, str]] = {}
"""Shared by all pods without annotations of ours."""


def pod_facts(pod: Raw) -> PodFacts | None:
    """Facts of one pod, from this object alone, so that they can be cached; None: its labels name no role of ours."""
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
        unpulled=_unpulled(pod),
        crashes=_crashes(pod),
        unstarted=_unstarted(pod),
        fetching=_fetching(pod),
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


NOT_PULLED: Final = {
    "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError",
    "RegistryUnavailable", "SignatureValidationFailed",
}  # fmt: skip
"""Why a container waits for its image, in the words of kubelet's pkg/kubelet/images/types.go."""


def _unpulled(pod: Raw) -> str:
    waiting = ((raw.text(one, "image"), raw.text(one, "state", "waiting", "reason")) for one in _containers(pod))
    return next((image or "its image" for image, reason in waiting if reason in NOT_PULLED), "")


CRASHES: Final = "CrashLoopBackOff"
NOT_STARTED: Final = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
"""Why a container does not run, in its kubelet's words."""


def _crashes(pod: Raw) -> str:
    for one in _containers(pod):
        if raw.text(one, "state", "waiting", "reason") == CRASHES:
            end = raw.part(one, "lastState", "terminated")
            how = f", with status {raw.count(end, 'exitCode')} ({raw.text(end, 'reason')})" if end else ""
            return f"container {raw.text(one, 'name')} ends at each start{how}"
    return ""


def _unstarted(pod: Raw) -> str:
    waiting = ((raw.text(one, "name"), raw.part(one, "state", "waiting")) for one in _containers(pod))
    found = ((name, why) for name, why in waiting if raw.text(why, "reason") in NOT_STARTED)
    return next((f"container {name} cannot be started: {raw.text(why, 'message')}" for name, why in found), "")


def _fetching(pod: Raw) -> bool:
    before = raw.parts(pod, "status", "initContainerStatuses")
    return any(raw.text(one, "name") == names.FETCH_CONTAINER and "running" in raw.part(one, "state") for one in before)


def _exits(pod: Raw) -> tuple[Exit, ...]:
    """A container that is started again has not ended for good."""
    if raw.text(pod, "spec", "restartPolicy") != "Never" and raw.text(pod, "status", "phase") not in (
        PodPhase.SUCCEEDED,
        PodPhase.FAILED,
    ):
        return ()
    return tuple(
        Exit(name, raw.count(end, "exitCode"), reason=raw.text(end, "reason")) for name, end in _terminated(pod)
    )


def _ended_at(pod: Raw) -> float | None:
    timestamps = [unix(raw.text(end, "finishedAt")) for _, end in _terminated(pod)]
    return max((at for at in timestamps if at is not None), default=None)


def _terminated(pod: Raw) -> list[tuple[str, Raw]]:
    states = [(raw.text(one, "name"), raw.part(one, "state", "terminated")) for one in _containers(pod)]
    return [(name, end) for name, end in states if end]


def _containers(pod: Raw) -> list[Raw]:
    return raw.parts(pod, "status", "containerStatuses") + raw.parts(pod, "status", "initContainerStatuses")


def _annotations(pod: Raw) -> dict[str, str]:
    written = raw.part(pod, "metadata", "annotations")
    return {key: raw.text(written, key)[:_READ_LENGTH] for key in _READ if key in written} or _NONE


def trainer_facts(job: Raw) -> TrainerFacts:
    """Facts of the trainer's Job."""
    complete, failed = raw.condition(job, "Complete"), raw.condition(job, "Failed")
    created_at = unix(raw.text(job, "metadata", "creationTimestamp")) or 0.0
    own, template = raw.part(job, "metadata", "labels"), raw.part(job, "spec", "template", "metadata", "labels")
    return TrainerFacts(
        uid=raw.text(job, "metadata", "uid"),
        created_at=created_at,
        active=raw.count(job, "status", "active"),
        terminating=raw.count(job, "status", "terminating"),
        ready=raw.count(job, "status", "ready"),
        failed=raw.count(job, "status", "failed"),
        suspended=raw.flag(job, "spec", "suspend"),
        backoff_limit=raw.part(job, "spec").get("backoffLimit"),
        stopped=raw.holds(raw.condition(job, "Suspended")),
        complete_at=(unix(raw.text(complete, "lastTransitionTime")) or created_at) if raw.holds(complete) else None,
        failed_at=(unix(raw.text(failed, "lastTransitionTime")) or created_at) if raw.holds(failed) else None,
        failed_reason=raw.text(failed, "reason") if raw.holds(failed) else "",
        failed_message=raw.text(failed, "message") if raw.holds(failed) else "",
        template_hash=raw.text(template, names.LABEL_TEMPLATE) or raw.text(own, names.LABEL_TEMPLATE),
        deleting="deletionTimestamp" in raw.part(job, "metadata"),
    )


def child_facts(kind: str, child: Raw) -> ChildFacts:
    """Facts of a child of this kind; its metadata are enough."""
    return ChildFacts(
        kind=kind,
        name=raw.text(child, "metadata", "name"),
        uid=raw.text(child, "metadata", "uid"),
        content_hash=raw.text(child, "metadata", "annotations", names.ANNOTATION_CONTENT)[:_READ_LENGTH],
        deleting="deletionTimestamp" in raw.part(child, "metadata"),
        expires_at=unix(raw.text(child, "metadata", "annotations", names.ANNOTATION_EXPIRES)),
    )


DISRUPTED_BY_CHOICE: Final = "DisruptionReason"
"""Condition of a NodeClaim that Karpenter ends of its own accord; its reason says Drifted, Underutilized, Empty."""


def node_facts(node: Raw) -> NodeFacts:
    """Facts of one node, as far as its own object has them."""
    ready = raw.condition(node, "Ready")
    message = ": ".join(filter(None, (raw.text(ready, "reason"), raw.text(ready, "message"))))
    return NodeFacts(
        name=raw.text(node, "metadata", "name"),
        created_at=unix(raw.text(node, "metadata", "creationTimestamp")) or 0.0,
        ready=raw.holds(ready) or not ready,
        ready_reason="" if raw.holds(ready) else message,
        ready_changed_at=unix(raw.text(ready, "lastTransitionTime")),
        unschedulable=raw.flag(node, "spec", "unschedulable"),
        taints=tuple(
            Taint(raw.text(taint, "key"), unix(raw.text(taint, "timeAdded")))
            for taint in raw.parts(node, "spec", "taints")
        ),
        deletion_at=unix(raw.text(node, "metadata", "deletionTimestamp")),
    )


def claim_facts(claim: Raw) -> ClaimFacts:
    """Facts of one NodeClaim."""
    chosen = raw.condition(claim, DISRUPTED_BY_CHOICE)
    return ClaimFacts(
        node=raw.text(claim, "status", "nodeName"),
        deletion_at=unix(raw.text(claim, "metadata", "deletionTimestamp")),
        reason=raw.text(chosen, "reason") if raw.holds(chosen) else "",
    )


def _with_claims(
    nodes: Mapping[str, NodeFacts], claims: Iterable[ClaimFacts], wanted: Iterable[str]
) -> dict[str, NodeFacts]:
    """Those of the `wanted` nodes that exist, with what their claims add: not every cluster has Karpenter."""
    found = {name: nodes[name] for name in set(wanted) if name in nodes}
    return found | {claim.node: replace(found[claim.node], claim=claim) for claim in claims if claim.node in found}
