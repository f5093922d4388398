"""Whose child an object is. Read next: `fixed`, `pods`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polyrl.cluster import names
from polyrl.manifest.job import API_VERSION, KIND, PolyRLJob
from polyrl.worker import Role


@dataclass(frozen=True)
class Owner:
    """The PolyRLJob that owns a child."""

    name: str
    namespace: str
    uid: str
    job: PolyRLJob
    domain: str = "cluster.local"
    """The cluster's DNS domain."""

    def metadata(self, name: str, role: Role | None = None) -> dict[str, Any]:
        """metadata of a child: name, labels, and the reference by which it goes when the job goes."""
        reference = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": names.labels(self.name, role),
            "ownerReferences": [reference],
        }
