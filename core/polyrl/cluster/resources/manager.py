"""The manager's pod: small, on-demand, started again in place, its journal on a volume."""

from __future__ import annotations

from typing import Final

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.cluster.resources import pod
from polyrl.cluster.resources.owner import Owner, Settings
from polyrl.cluster.resources.placement import manager_placement
from polyrl.cluster.resources.template import Fields
from polyrl.control import HEALTH_PATH
from polyrl.worker import Role

RESOURCES: Final[Fields] = {
    "requests": {"cpu": "250m", "memory": "256Mi"},
    "limits": {"memory": "2Gi"},
}
"""The manager's benchmark peaks at 86 to 190 MB, and at 513 MB with 8,192 samples of 4,000 tokens."""

START_SECONDS: Final = 120
"""Longest replay of a journal before the kubelet gives the container up."""
ALIVE_SECONDS: Final = 60
"""A manager that has not answered for so long is stuck, and a fresh one goes on from the journal."""
READY_PERIOD_SECONDS: Final = 2
ALIVE_PERIOD_SECONDS: Final = 10


def manager_pod(owner: Owner, ordinal: int, settings: Settings) -> Object:
    """The pod `J-manager-<ordinal>`. Only for jobs that sample."""
    spec = owner.job.spec
    worker = pod.pod_workers(owner).manager
    if worker is None:
        raise ValueError(f"{owner.name} samples nothing, so it has no manager")
    storage = spec.manager.storage
    volumes = (
        pod.job_volume(owner),
        pod.keys_volume(owner, "manager.key", "tls.crt", "tls.key"),
        pod.kept_volume("polyrl-journal", names.JOURNAL_DIR, storage, owner, names.manager_service(owner.name)),
        pod.tmp_volume(),
    )
    ours = pod.container(worker, settings.manager_image, settings, volumes)
    ours |= {"ports": _ports(spec.manager.port), "resources": RESOURCES, **_probes()}
    parts = pod.PodParts(
        role=Role.MANAGER,
        container=ours,
        volumes=volumes,
        placement=manager_placement(spec),
        grace_s=int(worker.grace_s) + 2,
        restart_policy="Always",
        annotations=pod.KEPT,
        priority_class=settings.trainer_priority_class,
    )
    return pod.bare_pod(owner, names.pod_name(owner.name, Role.MANAGER, ordinal), parts, spec.manager.template)


def _ports(http: int) -> list[Fields]:
    named = (("http", http), ("agents", names.AGENTS_PORT), ("trainer", names.TRAINER_PORT))
    return [{"name": name, "containerPort": port} for name, port in named]


def _probes() -> Fields:
    asked = {"httpGet": {"path": HEALTH_PATH, "port": "http", "scheme": "HTTPS"}, "timeoutSeconds": 5}
    return {
        "startupProbe": asked
        | {"periodSeconds": READY_PERIOD_SECONDS, "failureThreshold": START_SECONDS // READY_PERIOD_SECONDS},
        "readinessProbe": asked | {"periodSeconds": READY_PERIOD_SECONDS, "failureThreshold": 3},
        "livenessProbe": asked
        | {"periodSeconds": ALIVE_PERIOD_SECONDS, "failureThreshold": ALIVE_SECONDS // ALIVE_PERIOD_SECONDS},
    }
