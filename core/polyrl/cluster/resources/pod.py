"""What every pod of ours has in common: who it runs as, what is mounted where, the environment, and the merge.

/polyrl/job       ConfigMap: job.json, manager.json
/polyrl/keys      Secret of the role, its own files only, readable by the pod's group
/polyrl/engine-keys  the reserved engine's Secret, in the trainer's container
/tmp              emptyDir; HOME and all caches point there, since the root cannot be written to
/dev/shm          emptyDir in memory, for weights and tensors (trainer and rollouts)

Each container of ours has these two for itself, and each is bounded: what runs over costs its own pod, not the node. A
template that mounts a volume of its own at the path takes their place.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from polyrl.cluster import names
from polyrl.cluster.resources.fixed import config_map
from polyrl.cluster.resources.owner import Owner, Settings, template_hash, with_content_hash
from polyrl.cluster.resources.placement import Placement
from polyrl.cluster.resources.template import RESTRICTED, Fields, merged_metadata, merged_spec, template_fields
from polyrl.manifest.cluster import JournalStorage, PodTemplate, TrainerStorage
from polyrl.manifest.parts.user_code import CodeSpec
from polyrl.sample import Pool
from polyrl.worker import Pods, Role, RunLocation, Worker, Workers, workers_of

KEY_MODE: Final = 0o440
"""Mode of the Secret's files: root's, and readable by the pod's group through fsGroup."""

TMP: Final = "/tmp"

ENVIRONMENT: Final = {
    "PYTHONSAFEPATH": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HOME": TMP,
    "XDG_CACHE_HOME": f"{TMP}/cache",
    "MPLCONFIGDIR": f"{TMP}/matplotlib",
    "TORCHINDUCTOR_CACHE_DIR": f"{TMP}/inductor",
    "TRITON_CACHE_DIR": f"{TMP}/triton",
    "HF_HOME": f"{TMP}/huggingface",
}
"""Environment of every process of ours in a pod; the user's code lies in a folder that cannot be written to."""

KEPT: Final = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
"""Annotations of manager and trainer: autoscalers leave their nodes alone."""

POD_SECURITY: Final[Fields] = {
    "runAsNonRoot": True,
    "runAsUser": names.USER_ID,
    "runAsGroup": names.USER_ID,
    "fsGroup": names.USER_ID,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}


@dataclass(frozen=True)
class Mounted:
    """A volume and where it is mounted."""

    name: str
    path: str
    source: Fields
    read_only: bool = False
    sub_path: str = ""

    def volume(self) -> Fields:
        return {"name": self.name, **self.source}

    def mount(self) -> Fields:
        mount: Fields = {"name": self.name, "mountPath": self.path}
        mount |= {"readOnly": True} if self.read_only else {}
        return mount | ({"subPath": self.sub_path} if self.sub_path else {})


MANAGER_TMP: Final = "256Mi"
"""A manager's files are on its journal's volume; a few temporary ones remain."""
ENGINE_TMP: Final = "16Gi"
"""Compiled kernels and an engine's logs; models lie in memory."""
TRAINER_TMP: Final = "64Gi"
"""A Hub's model of 30 billion parameters in bfloat16, and compiled kernels."""
DEFAULT_MEMORY: Final = "32Gi"
"""Two versions of a model of 8 billion parameters in bfloat16, which an engine has while it switches; where the
container's memory is named, that is the bound, since what lies there counts as its memory."""


def tmp_volume(size: str) -> Mounted:
    return Mounted("polyrl-tmp", TMP, source={"emptyDir": {"sizeLimit": size}})


def memory_volume(resources: Fields) -> Mounted:
    """In memory; `resources` are the user's of the container that has it."""
    named = (resources.get(part, {}).get("memory") for part in ("limits", "requests"))
    size = next((str(amount) for amount in named if amount is not None), DEFAULT_MEMORY)
    return Mounted("polyrl-shm", "/dev/shm", source={"emptyDir": {"medium": "Memory", "sizeLimit": size}})


@dataclass(frozen=True)
class PodParts:
    """What a role puts into its pod."""

    role: Role
    container: Fields
    volumes: tuple[Mounted, ...]
    placement: Placement
    grace_s: int
    restart_policy: str
    annotations: dict[str, str]
    priority_class: str = ""
    labels: dict[str, str] | None = None
    subdomain: str = ""
    before: Sequence[Fields] = ()
    """Init containers of ours."""


def container(worker: Worker, image: str, settings: Settings, volumes: tuple[Mounted, ...]) -> Fields:
    """One container of ours: what `polyrl.worker` says runs, restricted, with `volumes` mounted."""
    env = [{"name": name, "value": value} for name, value in {**ENVIRONMENT, **worker.env}.items()]
    return {
        "name": worker.role.value,
        "image": image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": list(worker.argv),
        "env": env,
        "volumeMounts": [one.mount() for one in volumes],
        "securityContext": RESTRICTED,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def from_field(name: str, path: str) -> Fields:
    """An environment variable by the downward API."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def pod_template(owner: Owner, parts: PodParts, template: PodTemplate | None) -> Fields:
    """metadata (labels, annotations) and spec of a pod, with the user's template merged in."""
    metadata, spec = template_fields(template)
    labels = names.labels(owner.name, parts.role) | (parts.labels or {})
    labels[names.LABEL_TEMPLATE] = template_hash(owner, parts.role)
    defaults: Fields = {"serviceAccountName": owner.name, "automountServiceAccountToken": False}
    defaults |= {"enableServiceLinks": False}
    defaults |= {"priorityClassName": parts.priority_class} if parts.priority_class else {}
    secrets = owner.settings.image_pull_secrets
    defaults |= {"imagePullSecrets": [{"name": secret} for secret in secrets]} if secrets else {}
    forced: Fields = {"restartPolicy": parts.restart_policy, "terminationGracePeriodSeconds": parts.grace_s}
    ours = {
        "defaults": defaults,
        "forced": forced | ({"subdomain": parts.subdomain} if parts.subdomain else {}),
        "securityContext": POD_SECURITY,
        "container": parts.container,
        "initContainers": parts.before,
        "volumes": [one.volume() for one in parts.volumes],
    }
    merged = merged_metadata(metadata, labels, parts.annotations)
    return {"metadata": merged, "spec": merged_spec(spec, ours, parts.placement)}


def job_volume(owner: Owner) -> Mounted:
    """The run's ConfigMap."""
    name: str = config_map(owner)["metadata"]["name"]
    return Mounted("polyrl-job", names.JOB_DIR, source={"configMap": {"name": name}}, read_only=True)


def keys_volume(owner: Owner, role: Role) -> Mounted:
    """The files of this role's Secret; the reserved engine's lie beside the trainer's."""
    name = names.role_secret_name(owner.name, role)
    if role is Role.RESERVED:
        return _keys_volume(name, names.KEY_FILES[role], "polyrl-engine-keys", names.RESERVED_KEYS_DIR)
    return _keys_volume(name, names.KEY_FILES[role])


def engine_keys_volume(rollout: str) -> Mounted:
    """The files of the Secret of this rollout's own, which has its name."""
    return _keys_volume(rollout, names.AGENT_FILES)


def _keys_volume(
    secret_name: str, files: Sequence[str], name: str = "polyrl-keys", path: str = names.KEYS_DIR
) -> Mounted:
    items = [{"key": file, "path": file} for file in files]
    secret = {"secretName": secret_name, "defaultMode": KEY_MODE, "items": items}
    return Mounted(name, path, source={"secret": secret}, read_only=True)


def kept_volume(name: str, path: str, storage: TrainerStorage | JournalStorage, owner: Owner, claim: str) -> Mounted:
    """What outlives its pod, or as the manifest says, does not; `claim` is the one that the operator makes. In a claim
    of the user's each job has a folder of its own, so that none goes on where another one ended."""
    if storage.ephemeral:
        return Mounted(name, path, source={"emptyDir": {"sizeLimit": storage.size}})
    source = {"persistentVolumeClaim": {"claimName": storage.claim_name or claim}}
    return Mounted(name, path, source=source, sub_path="" if storage.claim_name is None else owner.uid)


def bare_pod(owner: Owner, name: str, parts: PodParts, template: PodTemplate | None) -> dict[str, Any]:
    """A pod that the job itself owns, with its content's hash."""
    merged = pod_template(owner, parts, template)
    metadata = owner.metadata(name, parts.role) | merged["metadata"]
    return with_content_hash({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": merged["spec"]})


def code_volume(code: CodeSpec) -> Mounted | None:
    """Where the user's files are mounted; None when they are in the image."""
    source: Fields = {"configMap": {"name": code.config_map}}
    if code.config_map is None and code.volume_claim is None:
        return None
    if code.config_map is None:
        source = {"persistentVolumeClaim": {"claimName": code.volume_claim, "readOnly": True}}
    path = posixpath.normpath(posixpath.join(names.MANIFEST_DIR, code.path))
    return Mounted("polyrl-code", path, source=source, read_only=True)


ADVERTISE_ENV: Final = "POLYRL_ADVERTISE_HOST"
"""The pod's own address, from the downward API."""

POD_INDEX_ENV: Final = "POLYRL_POD_INDEX"
"""Which one of its Job's pods it is."""
POD_INDEX: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

POD_NAME_ENV: Final = "POLYRL_POD_NAME"
"""The pod's own name: of a Job's pods nobody knows it before."""

PYTHON: Final = "python"
"""On the PATH of every image of ours."""


def pod_workers(owner: Owner, cpus: int = 1, pool: Pool = Pool.SPOT) -> Workers:
    """Every worker of the job as it runs in pods, rollouts in `pool`; `cpus` is what the trainer may use."""
    first = names.first_trainer_host(owner.name, owner.namespace, owner.settings.cluster_domain)
    pods = Pods(
        job=names.JOB_DIR,
        keys=names.KEYS_DIR,
        reserved_keys=names.RESERVED_KEYS_DIR,
        journal=names.JOURNAL_DIR,
        http_port=owner.job.spec.manager.port,
        agents_port=names.AGENTS_PORT,
        trainer_port=names.TRAINER_PORT,
        weights_port=names.PUBLISHER_PORT,
        exchange_port=names.EXCHANGE_PORT,
        advertise=f"$({ADVERTISE_ENV})",
        metrics_port=owner.settings.manager_metrics_port,
        index=f"$({POD_INDEX_ENV})",
        job_uid=owner.uid,
        first_trainer=f"{first}:{names.LEARNERS_PORT}",
    )
    place = RunLocation(names.RUN_DIR, names.MANIFEST_DIR, python=PYTHON, run_epoch=names.EPOCH, cpus=cpus, pods=pods)
    return workers_of(owner.job.spec, place, pool)


def whole_cpus(resources: Fields) -> int:
    """Cores that a container with these resources may use, at least 1; its limit counts before its request."""
    for part in ("limits", "requests"):
        amount = resources.get(part, {}).get("cpu")
        if amount is not None:
            return _cores(str(amount))
    return 1


def _cores(amount: str) -> int:
    """Whole cores in a quantity such as 2, 1.5 or 500m; 1 for an invalid one, which the API server will refuse."""
    try:
        return max(1, math.ceil(float(amount[:-1]) / 1000 if amount.endswith("m") else float(amount)))
    except (ValueError, OverflowError):  # no number, none that is one, infinitely many
        return 1
