"""Every name that the cluster side of a job goes by: objects, labels, annotations, ports, paths inside pods.

Names of pods end in an ordinal that only grows, so that a name is made before the request that uses it (a repeat is
answered with "already exists", not with a twin) and never means two pods. Job names have at most 46 characters, so that
each of these stays within a DNS label's 63.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from polyrl.worker import Role

GROUP: Final = "polyrl.dev"
VERSION: Final = "v1alpha1"
PLURAL: Final = "polyrljobs"
MANAGED_BY: Final = "polyrl-operator"
"""Value of app.kubernetes.io/managed-by on all that we make, for people."""

APP: Final = "app.kubernetes.io"
LABEL_MANAGED_BY: Final = f"{APP}/managed-by"
LABEL_JOB: Final = f"{GROUP}/job-name"
LABEL_ROLE: Final = f"{GROUP}/role"
LABEL_POOL: Final = f"{GROUP}/pool"
LABEL_TEMPLATE: Final = f"{GROUP}/template-hash"

OPERATOR_LABELS: Final = {f"{APP}/name": "polyrl", f"{APP}/component": "operator"}
"""Labels of the operator's own pods, as the chart writes them; network rules let them reach managers."""

ANNOTATION_CONTENT: Final = f"{GROUP}/content-hash"
"""On every child: hash of what it was made as."""
ANNOTATION_EXPIRES: Final = f"{GROUP}/certificate-expires-at"
"""On the manager's Secret: when the certificate in it ends, RFC 3339."""
ANNOTATION_NOTICED_AT: Final = f"{GROUP}/preempted-at"
"""On a rollout pod: when its end was first seen, RFC 3339; written once, so that a new operator counts it once."""
ANNOTATION_NOTICE: Final = f"{GROUP}/preempt-reason"
ANNOTATION_COUNTED: Final = f"{GROUP}/counted"
"""On a pod that was taken away or failed: `preemption-7`, the seventh of its job; written before the pod is deleted.
The counter in the status is the highest number written, so that no crash and no stale read counts a pod twice."""
ANNOTATION_RELEASED: Final = f"{GROUP}/released"
"""On a pod that we chose to delete: why; written before the deletion, so that it is not taken for a preemption."""

AGENTS_PORT: Final = 5001
TRAINER_PORT: Final = 5002
PUBLISHER_PORT: Final = 5003
LEARNERS_PORT: Final = 5004
EXCHANGE_PORT: Final = 5005
"""Fixed inside pods, where nobody else listens; the HTTP port is the manifest's `manager.port`."""

JOB_DIR: Final = "/polyrl/job"
"""job.json and manager.json."""
KEYS_DIR: Final = "/polyrl/keys"
RESERVED_KEYS_DIR: Final = "/polyrl/engine-keys"
"""Folder of the reserved engine's keys, in the trainer's container."""
RUN_DIR: Final = "/polyrl/run"
"""Trainer only: checkpoints, metrics, result."""
JOURNAL_DIR: Final = "/polyrl/journal"
MANIFEST_DIR: Final = "/polyrl/manifest"
"""Where the manifest's relative paths start from."""

FETCHED_DIR: Final = "/polyrl/fetched"
"""Trainer only: models that were fetched."""
MODEL_DIR: Final = "/polyrl/model"
"""Trainer only: the claim that the model is in."""
FETCH_CONTAINER: Final = "fetch"
"""The trainer's, which fetches the model."""

EPOCH: Final = 1
"""On a cluster a job has one epoch: suspend and resume are to the ledger what a kill of everything is."""

USER_ID: Final = 10001
"""User and group of every process of ours; a number, because `runAsNonRoot` cannot judge a name."""


def manager_service(job: str) -> str:
    return f"{job}-manager"


def trainer_name(job: str) -> str:
    """Name of the trainer's Job, headless Service, volume claim and disruption budget."""
    return f"{job}-trainer"


def first_trainer_host(job: str, namespace: str, cluster_domain: str) -> str:
    """Whole DNS name of the trainer's first pod, dot and all, so that no search domain is asked."""
    name = trainer_name(job)
    return f"{name}-0.{name}.{namespace}.svc.{cluster_domain}."


AGENT_FILES: Final = ("agent.key",)

KEY_FILES: Final[Mapping[Role, tuple[str, ...]]] = {
    Role.MANAGER: ("manager.key", "ca.crt", "tls.crt", "tls.key"),
    Role.TRAINER: ("trainer.key",),
    Role.RESERVED: AGENT_FILES,
}
"""Files of the Secrets of what a job has one of; each rollout has a Secret of its own, with AGENT_FILES. A kubelet may
read the whole of every Secret that a pod of its node names, so what a pod of spot capacity must not see is in no Secret
that it names."""


def keys_secret_name(job: str) -> str:
    """The Secret that the keys of a run come from: all of them. The operator reads it; no pod names it."""
    return f"{job}-keys"


def role_secret_name(job: str, role: Role) -> str:
    """The Secret with a copy of this role's files, which its containers mount."""
    return f"{job}-keys-{role.value}"


def reserved_engines(job: str) -> str:
    """Beginning of the names of the trainer's pods, which its engines have too; the Job and a number end them."""
    return f"{trainer_name(job)}-*"


def config_map_name(job: str, content_hash: str) -> str:
    return f"{job}-cfg-{content_hash}"


def pod_name(job: str, role: Role, ordinal: int) -> str:
    """Name of the manager's or a rollout's pod."""
    return f"{job}-{'r' if role is Role.ROLLOUT else role.value}-{ordinal}"


def ordinal_of(pod: str) -> int:
    """The number that a pod's name ends in; 0 when there is none."""
    last = pod.rpartition("-")[2]
    return int(last) if last.isdecimal() else 0


def labels(job: str, role: Role | None = None) -> dict[str, str]:
    """Labels of a child of `job`."""
    own = {
        f"{APP}/name": "polyrl",
        f"{APP}/instance": job,
        f"{APP}/part-of": "polyrl",
        LABEL_MANAGED_BY: MANAGED_BY,
        LABEL_JOB: job,
    }
    return own if role is None else own | {f"{APP}/component": role.value, LABEL_ROLE: role.value}


def selector(job: str, role: Role) -> str:
    """Label selector of the job's pods of one role, as text."""
    return f"{LABEL_JOB}={job},{LABEL_ROLE}={role.value}"
