"""One object as it is kept: the facts that decisions read, with what look-ups need beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.cluster.observation.job import child_facts, claim_facts, node_facts, trainer_facts
from polyrl.cluster.observation.pods import pod_facts
from polyrl_operator.api.kinds import CLAIM, JOB, NODE, POD, TRAINER, ResourceKind

ANNOTATIONS: Final = ("polyrl.dev/", "karpenter.sh/")
"""Prefixes of the annotations of jobs that are kept; others may be 256 KiB."""

METADATA: Final = ("name", "namespace", "uid", "generation", "creationTimestamp", "deletionTimestamp", "labels")


class JobKey(NamedTuple):
    """A job."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Place(NamedTuple):
    """What no two objects that live share."""

    kind: str
    namespace: str
    """Empty for objects of the whole cluster."""
    name: str


@dataclass(slots=True)
class CachedObject:
    """One object. Two are equal when nothing changed that anybody reads: heartbeats change nothing."""

    uid: str
    job: JobKey | None
    """The job itself, or the one that a child's labels name; None for nodes and NodeClaims."""
    owner: str
    """uid of its controller; empty: none."""
    node: str
    """Of a pod or a NodeClaim, and a node's own name; empty: none yet."""
    content: Any
    """Facts of its kind (None for a pod of no role of ours); of a job its JSON text."""
    version: int = field(compare=False)
    changed_at: float = field(compare=False)
    """Monotonic: when the change came that made it so."""


_FACTS: Final[dict[ResourceKind, Callable[[Object], Any]]] = {
    POD: pod_facts,
    TRAINER: trainer_facts,
    NODE: node_facts,
    CLAIM: claim_facts,
}


def cached_object(kind: ResourceKind, raw: Object, now: float) -> CachedObject:
    """An object as the API server gave it, to be kept."""
    metadata = raw["metadata"]
    owners = (owner["uid"] for owner in metadata.get("ownerReferences") or () if owner.get("controller"))
    if kind is JOB:
        content: Any = msgspec.json.encode(_job(raw))
    else:
        content = _FACTS[kind](raw) if kind in _FACTS else child_facts(kind.name, raw)
    return CachedObject(
        uid=metadata["uid"],
        job=_job_of(kind, metadata),
        owner=next(owners, ""),
        node=_node(kind, raw),
        content=content,
        version=version_of(metadata),
        changed_at=now,
    )


def version_of(metadata: Object) -> int:
    """API servers promise that versions of one kind can be compared as numbers."""
    return int(metadata.get("resourceVersion") or 0)


def place_of(kind: ResourceKind, metadata: Object) -> Place:
    """Where the object with these metadata lies."""
    return Place(kind.name, metadata.get("namespace", ""), metadata["name"])


def _job_of(kind: ResourceKind, metadata: Object) -> JobKey | None:
    if kind in (NODE, CLAIM):
        return None
    name = metadata["name"] if kind is JOB else (metadata.get("labels") or {}).get(names.LABEL_JOB, "")
    return JobKey(metadata["namespace"], name)


def _node(kind: ResourceKind, raw: Object) -> str:
    if kind is NODE:
        return str(raw["metadata"]["name"])
    part = {POD: "spec", CLAIM: "status"}.get(kind, "")
    return str((raw.get(part) or {}).get("nodeName") or "")


def _job(raw: Object) -> Object:
    """Without resourceVersion, which by itself changes nothing, and without what may be long and is not read."""
    metadata = {key: raw["metadata"][key] for key in METADATA if key in raw["metadata"]}
    annotations = raw["metadata"].get("annotations") or {}
    ours = {key: value for key, value in annotations.items() if key.startswith(ANNOTATIONS)}
    kept: Object = {"apiVersion": JOB.api_version, "kind": JOB.name, "metadata": metadata | {"annotations": ours}}
    return kept | {part: raw[part] for part in ("spec", "status") if part in raw}
