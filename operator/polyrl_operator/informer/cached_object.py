"""One object as it is kept: trimmed, as JSON text, with what look-ups need beside it.

Refuses to hold: several of them (see `cache`). Read next: `cache`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl_operator.api.kinds import CLAIM, POD, ResourceKind
from polyrl_operator.informer.trim import trimmed


class JobKey(NamedTuple):
    """A job."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(slots=True)
class CachedObject:
    """One object."""

    uid: str
    version: int
    text: bytes
    owner: str
    """uid of its controller; empty: none."""
    node: str
    """Of a pod or a NodeClaim; empty: none yet."""
    changed_at: float
    """Monotonic: when the change came that made it so."""

    def read(self) -> Object:
        """The object, with its newest resourceVersion."""
        raw: Object = msgspec.json.decode(self.text)
        raw["metadata"]["resourceVersion"] = str(self.version)
        return raw


NOWHERE: Final = CachedObject(uid="", version=0, text=b"", owner="", node="", changed_at=0.0)


def held_of(kind: ResourceKind, raw: Object, now: float) -> CachedObject:
    """An object as the API server gave it, to be kept."""
    metadata = raw["metadata"]
    owners = (owner["uid"] for owner in metadata.get("ownerReferences") or () if owner.get("controller"))
    node = ""
    if kind is POD:
        node = (raw.get("spec") or {}).get("nodeName") or ""
    elif kind is CLAIM:
        node = (raw.get("status") or {}).get("nodeName") or ""
    text = msgspec.json.encode(trimmed(kind, raw))
    return CachedObject(metadata["uid"], version_of(metadata), text, next(owners, ""), node, now)


def version_of(metadata: Object) -> int:
    """API servers promise that versions of one kind can be compared as numbers."""
    return int(metadata.get("resourceVersion") or 0)


def job_of(metadata: Object) -> JobKey:
    """The job that a child's labels name."""
    return JobKey(metadata["namespace"], (metadata.get("labels") or {}).get(names.LABEL_JOB, ""))


def place_of(kind: ResourceKind, metadata: Object) -> tuple[str, str, str]:
    """What no two objects that live share."""
    return kind.name, metadata.get("namespace", ""), metadata["name"]
