"""Raw objects, as the API server gives them, to the facts of one job. Any field may be missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from pydantic import ValidationError

from polyrl.cluster import names
from polyrl.cluster.observation import raw
from polyrl.cluster.observation.facts import (
    ChildFacts,
    ClaimFacts,
    JobFacts,
    ManagerFacts,
    NodeFacts,
    PodFacts,
    Taint,
    TrainerFacts,
)
from polyrl.cluster.observation.raw import Raw
from polyrl.cluster.timestamps import unix
from polyrl.manifest.job import PolyRLJob
from polyrl.manifest.spec import OPERATOR
from polyrl.manifest.status import JobStatus

MAX_FAULTS: Final = 5
"""Faults of a manifest named in one sentence; a person mends a few at a time."""


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
    job, refusal = _job(raw_job)
    return JobFacts(
        name=raw.text(raw_job, "metadata", "name"),
        namespace=raw.text(raw_job, "metadata", "namespace"),
        uid=raw.text(raw_job, "metadata", "uid"),
        generation=raw.count(raw_job, "metadata", "generation"),
        created_at=unix(raw.text(raw_job, "metadata", "creationTimestamp")) or 0.0,
        job=job,
        status=_status(raw_job),
        refusal=refusal,
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


def _job(raw_job: Raw) -> tuple[PolyRLJob | None, str]:
    """The job, or the sentence that says why it is none."""
    given = {key: value for key, value in raw_job.items() if key != "status"}
    try:
        return PolyRLJob.model_validate(given), ""
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        return None, "; ".join(faults[:MAX_FAULTS])


def _status(raw_job: Raw) -> JobStatus:
    """As stored; one that cannot be read is rebuilt from nothing, as everything in it can be."""
    try:
        return JobStatus.model_validate(dict(raw.part(raw_job, "status")))
    except ValidationError:
        return JobStatus()


def trainer_facts(job: Raw) -> TrainerFacts:
    """Facts of the trainer's Job."""
    complete, failed = raw.condition(job, "Complete"), raw.condition(job, "Failed")
    created_at = unix(raw.text(job, "metadata", "creationTimestamp")) or 0.0
    own, template = raw.part(job, "metadata", "labels"), raw.part(job, "spec", "template", "metadata", "labels")
    return TrainerFacts(
        uid=raw.text(job, "metadata", "uid"),
        active=raw.count(job, "status", "active"),
        ready=raw.count(job, "status", "ready"),
        failed=raw.count(job, "status", "failed"),
        suspended=raw.flag(job, "spec", "suspend"),
        created_at=created_at,
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
        content_hash=raw.text(child, "metadata", "annotations", names.ANNOTATION_CONTENT),
        deleting="deletionTimestamp" in raw.part(child, "metadata"),
    )


DISRUPTED_BY_CHOICE: Final = "DisruptionReason"
"""Condition of a NodeClaim that Karpenter ends of its own accord; its reason says Drifted, Underutilized, Empty."""


def node_facts(node: Raw) -> NodeFacts:
    """Facts of one node, as far as its own object has them."""
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
    by_node = {claim.node: claim for claim in claims}
    return {name: _with_claim(nodes[name], by_node.get(name)) for name in set(wanted) if name in nodes}


def _with_claim(node: NodeFacts, claim: ClaimFacts | None) -> NodeFacts:
    if claim is None:
        return node
    return replace(node, claim_deletion_at=claim.deletion_at, claim_reason=claim.reason)


def _taint(taint: Raw) -> Taint:
    return Taint(
        raw.text(taint, "key"), raw.text(taint, "value"), raw.text(taint, "effect"), unix(raw.text(taint, "timeAdded"))
    )
