"""The children that a job has whatever happens: ServiceAccount, ConfigMap, Services, claims, budget, network rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.cluster.resources.network import network_policies
from polyrl.cluster.resources.owner import Owner, hash_of, some, with_content_hash
from polyrl.cluster.resources.template import Fields
from polyrl.control import Endpoints
from polyrl.manifest.cluster import JournalStorage, TrainerStorage
from polyrl.manifest.job import API_VERSION, KIND
from polyrl.worker import Role, wants_engines


def fixed_children(owner: Owner) -> tuple[Object, ...]:
    """All of them, each with its content's hash; a job without engines gets no manager, nor its Service and volume."""
    return (config_map(owner), *(with_content_hash(child) for child in _children(owner)))


def manager_hosts(owner: Owner) -> tuple[str, ...]:
    """DNS names of the manager's Service, shortest first: what its certificate is for."""
    service = f"{names.manager_service(owner.name)}.{owner.namespace}"
    plain = names.manager_service(owner.name)
    return plain, service, f"{service}.svc", f"{service}.svc.{owner.settings.cluster_domain}"


def _children(owner: Owner) -> Iterator[Object]:
    spec = owner.job.spec
    yield owner.object("v1", "ServiceAccount", owner.name, automountServiceAccountToken=False)
    yield _trainer_service(owner)
    yield from _claim(owner, Role.TRAINER, names.trainer_name(owner.name), spec.trainer.storage)
    if wants_engines(spec):
        yield _manager_service(owner)
        yield from _claim(owner, Role.MANAGER, names.manager_service(owner.name), spec.manager.storage)
    if spec.pod_disruption_budget.trainer == "Auto":
        yield _budget(owner)
    if spec.network_policy.mode == "Isolated":
        yield from network_policies(owner)


def _manager_service(owner: Owner) -> Object:
    """Only a manager that answers gets connections, so that peers retry instead of talking to one that replays."""
    ports = (("http", owner.job.spec.manager.port), ("agents", names.AGENTS_PORT), ("trainer", names.TRAINER_PORT))
    spec = {"type": "ClusterIP", "selector": owner.selector(Role.MANAGER), "ports": [_port(*port) for port in ports]}
    return owner.object("v1", "Service", names.manager_service(owner.name), Role.MANAGER, spec=spec)


def _trainer_service(owner: Owner) -> Object:
    """Headless: ranks find each other by name before they are ready."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": owner.selector(Role.TRAINER),
        "ports": [_port("weights", names.PUBLISHER_PORT)],
    }
    return owner.object("v1", "Service", names.trainer_name(owner.name), Role.TRAINER, spec=spec)


def _port(name: str, port: int) -> Fields:
    return {"name": name, "port": port, "targetPort": port, "protocol": "TCP"}


def _claim(owner: Owner, role: Role, name: str, storage: TrainerStorage | JournalStorage) -> Iterator[Object]:
    if storage.ephemeral or storage.claim_name is not None:
        return
    spec: Fields = {"accessModes": [_access(storage)], "resources": {"requests": {"storage": storage.size}}}
    if storage.storage_class_name is not None:
        spec["storageClassName"] = storage.storage_class_name
    yield owner.object("v1", "PersistentVolumeClaim", name, role, spec=spec)


def _access(storage: TrainerStorage | JournalStorage) -> str:
    return storage.access_mode if isinstance(storage, TrainerStorage) else "ReadWriteOnce"


def _budget(owner: Owner) -> Object:
    """An integer: percentages need a controller with a scale, which our job has for its rollouts."""
    spec = {
        "minAvailable": owner.job.spec.trainer.replicas,
        "selector": {"matchLabels": owner.selector(Role.TRAINER)},
        # A trainer that is not ready protects nothing, and must not hold up its node.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return owner.object("policy/v1", "PodDisruptionBudget", names.trainer_name(owner.name), Role.TRAINER, spec=spec)


READ_OF_TRAINER: Final = (
    *("replicas", "processesPerPod", "contextParallel", "fsdp"),
    *("reservedEngine", "reservedMemFraction", "reservedSleep"),
)
READ_OF_ROLLOUT: Final = ("engine", "drainSeconds", "leaseSeconds", "lostAfterSeconds", "weightDeltas", "mooncake")
"""Fields that a worker acts on."""


def config_map(owner: Owner) -> Object:
    """ConfigMap with job.json and manager.json: what the job's workers read of it, and where the manager is. Immutable,
    named by its content, which is only what a worker acts on: a change of scaling, suspension or a template makes no
    new one."""
    data = {"job.json": _job(owner), "manager.json": _endpoints(owner)}
    name = names.config_map_name(owner.name, hash_of(data))
    return with_content_hash(owner.object("v1", "ConfigMap", name, immutable=True, data=data))


def _job(owner: Owner) -> str:
    """A PolyRLJob again, so that workers read on a cluster what they read on a laptop. Defaults are left out: workers
    of images from before a field would refuse the job for its default, and others would start anew for it."""
    written = owner.job.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    rollout, trainer = written.get("rollout", {}), written.get("trainer", {})
    shared = some(trainer.get("storage", {}), "accessMode") if "replicas" in trainer else {}
    placed = some(rollout.get("capacity", {}), "preset", "metadataService")
    read = {
        "recipe": written["recipe"],
        "trainer": some(trainer, *READ_OF_TRAINER) | ({"storage": shared} if shared else {}),
        "rollout": some(rollout, *READ_OF_ROLLOUT) | ({"capacity": placed} if placed else {}),
    }
    job = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": owner.name}, "spec": read}
    return msgspec.json.format(msgspec.json.encode(job, order="sorted"), indent=1).decode() + "\n"


def _endpoints(owner: Owner) -> str:
    """The keys are in the key files. Peers look up the whole name, dot and all: a shorter one would be asked for in
    every search domain, and of the world outside, wherever the cluster has no IPv6 address for it."""
    host = names.manager_service(owner.name)
    whole = f"{host}.{owner.namespace}.svc.{owner.settings.cluster_domain}."
    endpoints = Endpoints(
        agents=f"tcp://{whole}:{names.AGENTS_PORT}",
        trainer=f"tcp://{whole}:{names.TRAINER_PORT}",
        http=f"https://{host}:{owner.job.spec.manager.port}",
        pid=0,
        run_epoch=names.EPOCH,
        public_key="",
    )
    return msgspec.json.format(msgspec.json.encode(endpoints)).decode() + "\n"
