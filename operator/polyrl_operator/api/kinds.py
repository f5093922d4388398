"""The kinds of objects that the operator reads and writes, their URLs, and the permission that each request needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import quote

from polyrl.cluster import names
from polyrl.manifest.job import API_VERSION, KIND


@dataclass(frozen=True)
class ResourceKind:
    """One kind of object."""

    name: str
    group: str
    """Empty for the core group."""
    version: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """URL path of a collection (no name), an object or a subresource; no namespace: of the whole cluster."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        place = f"/namespaces/{quote(namespace)}" if self.namespaced and namespace is not None else ""
        tail = "".join(f"/{quote(part)}" for part in (name, subresource) if part)
        return f"{root}{place}/{self.plural}{tail}"


JOB: Final = ResourceKind(KIND, names.GROUP, version=names.VERSION, plural=names.PLURAL)
POD: Final = ResourceKind("Pod", "", version="v1", plural="pods")
TRAINER: Final = ResourceKind("Job", "batch", version="v1", plural="jobs")
NODE: Final = ResourceKind("Node", "", version="v1", plural="nodes", namespaced=False)
CLAIM: Final = ResourceKind("NodeClaim", "karpenter.sh", version="v1", plural="nodeclaims", namespaced=False)
SECRET: Final = ResourceKind("Secret", "", version="v1", plural="secrets")
EVENT: Final = ResourceKind("Event", "events.k8s.io", version="v1", plural="events")
LEASE: Final = ResourceKind("Lease", "coordination.k8s.io", version="v1", plural="leases")
TOKEN_REVIEW: Final = ResourceKind(
    "TokenReview", "authentication.k8s.io", version="v1", plural="tokenreviews", namespaced=False
)
ACCESS_REVIEW: Final = ResourceKind(
    "SubjectAccessReview", "authorization.k8s.io", version="v1", plural="subjectaccessreviews", namespaced=False
)
"""Questions to the API server, of which nothing is stored."""

FIXED: Final = (
    ResourceKind("ServiceAccount", "", version="v1", plural="serviceaccounts"),
    ResourceKind("Service", "", version="v1", plural="services"),
    ResourceKind("ConfigMap", "", version="v1", plural="configmaps"),
    ResourceKind("PersistentVolumeClaim", "", version="v1", plural="persistentvolumeclaims"),
    ResourceKind("PodDisruptionBudget", "policy", version="v1", plural="poddisruptionbudgets"),
    ResourceKind("NetworkPolicy", "networking.k8s.io", version="v1", plural="networkpolicies"),
)
"""Children that are made once and rarely change: not watched, listed (metadata only) at start and at every resync."""

KINDS: Final[Mapping[str, ResourceKind]] = {
    kind.name: kind
    for kind in (JOB, POD, TRAINER, NODE, CLAIM, SECRET, EVENT, LEASE, TOKEN_REVIEW, ACCESS_REVIEW, *FIXED)
}

_VERBS: Final = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}

assert JOB.api_version == API_VERSION


class Permission(NamedTuple):
    """One permission, as a rule of a Role grants it."""

    verb: str
    group: str
    resource: str
    """Plural, with `/subresource` where there is one; a path starting with `/` for what is no resource."""


def permission_for(method: str, path: str, watch: bool = False) -> Permission:
    """The permission that a request needs."""
    parts = path.strip("/").split("/")
    if parts[0] == "api" and len(parts) > 2:
        group, rest = "", parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, rest = parts[1], parts[3:]
    else:
        return Permission(method.lower(), "", resource=path)
    if rest[0] == "namespaces" and len(rest) > 2:
        rest = rest[2:]
    if method != "GET":
        verb = _VERBS[method]
    elif watch:
        verb = "watch"
    else:
        verb = "get" if len(rest) > 1 else "list"
    return Permission(verb, group, resource="/".join((rest[0], *rest[2:])))
