"""Whose child an object is, and content hashes of children."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.manifest.job import API_VERSION, KIND, JobSpec, PolyRLJob
from polyrl.worker import Role


@dataclass(frozen=True)
class Settings:
    """Settings of one operator, the same for all its jobs."""

    manager_image: str
    trainer_image: str
    rollout_image: str
    """Default images; a template's own `image` wins."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets in the jobs' namespaces; a template's own `imagePullSecrets` win."""
    cluster_domain: str = "cluster.local"
    trainer_priority_class: str = ""
    rollout_priority_class: str = ""
    """Names of PriorityClasses that the chart made; empty: none."""
    manager_metrics_port: int = 0
    """Where managers show their numbers to Prometheus, plain and without a token; 0: nowhere."""
    operator_namespace: str = "default"
    """Namespace of the operator's own pod: in isolated jobs it alone reaches managers."""
    dns_namespace: str = "kube-system"
    dns_addresses: tuple[str, ...] = ()
    """Where isolated pods may ask for names: pods of this namespace, and these addresses (CIDR)."""


@dataclass(frozen=True)
class Owner:
    """The PolyRLJob that owns a child, and what this operator makes children with."""

    name: str
    namespace: str
    uid: str
    job: PolyRLJob
    settings: Settings

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

    def object(self, version: str, kind: str, name: str, role: Role | None = None, **fields: Any) -> Object:
        """A child, without its content's hash."""
        return {"apiVersion": version, "kind": kind, "metadata": self.metadata(name, role), **fields}

    def selector(self, role: Role) -> dict[str, str]:
        """Labels that this job's pods of `role` have, and no others."""
        return {names.LABEL_JOB: self.name, names.LABEL_ROLE: role.value}


HASH_CHARACTERS: Final = 10
"""Hexadecimal digits of a hash: 40 bits, so that two contents of one job differ; short enough for names and labels."""


def content_hash(obj: Object) -> str:
    """Hash of an object without its hash label: HASH_CHARACTERS hexadecimal digits."""
    annotations = dict(obj["metadata"].get("annotations", {}))
    annotations.pop(names.ANNOTATION_CONTENT, None)
    return hash_of(obj | {"metadata": obj["metadata"] | {"annotations": annotations}})


def with_content_hash(obj: Object) -> Object:
    """The object with its content's hash as an annotation."""
    annotations = obj["metadata"].get("annotations", {}) | {names.ANNOTATION_CONTENT: content_hash(obj)}
    return obj | {"metadata": obj["metadata"] | {"annotations": annotations}}


def template_hash(owner: Owner, role: Role) -> str:
    """Hash of the manifest fields that shape this role's pods; HASH_CHARACTERS hexadecimal digits."""
    return hash_of(_written(owner.job.spec, role))


TRAINER_SHAPE: Final = (
    *("template", "replicas", "processesPerPod", "contextParallel", "fsdp", "capacity"),
    *("reservedEngine", "reservedMemFraction", "reservedSleep", "graceSeconds"),
)

READ_BY_TRAINER: Final = ("weightDeltas", "mooncake")
"""Fields of `spec.rollout` that its publisher acts on."""
OF_ITS_JOB: Final = ("recipe", "failurePolicy")


def _written(spec: JobSpec, role: Role) -> dict[str, Any]:
    """Defaults are left out: a field that a later version adds changes nothing for those who never set it."""
    wrote = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    rollout, trainer, manager = (wrote.get(part, {}) for part in ("rollout", "trainer", "manager"))
    preset = rollout.get("capacity", {}).get("preset")
    engine = some(rollout, "engine", "drainSeconds") | {"preset": preset}
    match role:
        case Role.ROLLOUT:
            return engine | some(rollout, "template") | some(rollout.get("capacity", {}), "metadataService")
        case Role.MANAGER:
            return some(manager, "template", "port") | {"preset": preset}
        case Role.TRAINER | Role.RESERVED:
            beside = engine if spec.trainer.reserved_engine else {"preset": preset}
            return beside | some(trainer, *TRAINER_SHAPE) | some(rollout, *READ_BY_TRAINER) | some(wrote, *OF_ITS_JOB)


def some(part: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The entries of `part` under `keys`, as far as they are there."""
    return {key: part[key] for key in keys if key in part}


def hash_of(value: Any) -> str:
    """Hash of a plain value, HASH_CHARACTERS hexadecimal digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_CHARACTERS]
