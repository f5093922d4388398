"""Raw objects, as the API server gives them, to the facts of one job. Any field may be missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pydantic import ValidationError

from polyrl.cluster import names
from polyrl.cluster.observation import raw
from polyrl.cluster.observation.facts import (
    ChildFacts,
    JobFacts,
    ManagerFacts,
    NodeFacts,
    PodFacts,
    Taint,
    TrainerFacts,
)
from polyrl.cluster.observation.raw import NOTHING, Raw
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
    trainer: Raw | None,
    nodes: Mapping[str, Raw] | None,
    claims: Mapping[str, Raw],
    children: Iterable[Raw],
    manager: ManagerFacts | None,
    dry_run: str | None,
) -> JobFacts:
    """Facts of one job. `pods` (from `pod_facts`) and `children` are those with its label, `nodes` those of the cluster
    by name (None when the operator may not watch nodes), `claims` the Karpenter NodeClaims by any key. Each of
    `children` has its `kind`.
    """
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
        trainer=None if trainer is None else _trainer(trainer),
        pods=tuple(seen),
        nodes=node_facts(nodes or {}, claims, (pod.node for pod in seen if pod.node)),
        sees_nodes=nodes is not None,
        children=tuple(_child(child) for child in children),
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


def _trainer(job: Raw) -> TrainerFacts:
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


def _child(child: Raw) -> ChildFacts:
    return ChildFacts(
        kind=raw.text(child, "kind"),
        name=raw.text(child, "metadata", "name"),
        uid=raw.text(child, "metadata", "uid"),
        content_hash=raw.text(child, "metadata", "annotations", names.ANNOTATION_CONTENT),
        deleting="deletionTimestamp" in raw.part(child, "metadata"),
    )


DISRUPTED_BY_CHOICE: Final = "DisruptionReason"
"""Condition of a NodeClaim that Karpenter ends of its own accord; its reason says Drifted, Underutilized, Empty."""


def node_facts(nodes: Mapping[str, Raw], claims: Mapping[str, Raw], wanted: Iterable[str]) -> dict[str, NodeFacts]:
    """Facts of those of the `wanted` nodes that exist. `claims` may be empty: not every cluster has Karpenter."""
    by_node = {raw.text(claim, "status", "nodeName"): claim for claim in claims.values()}
    return {name: _node(nodes[name], by_node.get(name, NOTHING)) for name in set(wanted) if name in nodes}


def _node(node: Raw, claim: Raw) -> NodeFacts:
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
        claim_deletion_at=unix(raw.text(claim, "metadata", "deletionTimestamp")),
        claim_reason=_claim_reason(claim),
    )


def _taint(taint: Raw) -> Taint:
    return Taint(
        raw.text(taint, "key"), raw.text(taint, "value"), raw.text(taint, "effect"), unix(raw.text(taint, "timeAdded"))
    )


def _claim_reason(claim: Raw) -> str:
    chosen = raw.condition(claim, DISRUPTED_BY_CHOICE)
    return raw.text(chosen, "reason") if raw.holds(chosen) else ""
