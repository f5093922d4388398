"""The children that a job has whatever happens: ServiceAccount, ConfigMap, Services, claims, budget, network rules.

Refuses to hold: the Secret (its keys are drawn by the shell), pods, the trainer's Job. Read next: `config`, `network`.
"""

from __future__ import annotations

from collections.abc import Iterator

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.cluster.resources.config import config_map
from polyrl.cluster.resources.hashes import with_content_hash
from polyrl.cluster.resources.network import network_policies
from polyrl.cluster.resources.owner import Owner
from polyrl.cluster.resources.pods.template import Fields
from polyrl.cluster.settings import Settings
from polyrl.manifest.cluster import JournalStorage, TrainerStorage
from polyrl.worker import Role, wants_engines


def fixed_children(owner: Owner, settings: Settings) -> tuple[Object, ...]:
    """All of them, each stamped with its content's hash; a job without engines has no manager and nothing of one."""
    return (config_map(owner), *(with_content_hash(child) for child in _children(owner)))


def manager_hosts(owner: Owner, settings: Settings) -> tuple[str, ...]:
    """DNS names of the manager's Service, shortest first: what its certificate is for."""
    service = f"{names.manager_service(owner.name)}.{owner.namespace}"
    plain = names.manager_service(owner.name)
    return plain, service, f"{service}.svc", f"{service}.svc.{settings.cluster_domain}"


def _children(owner: Owner) -> Iterator[Object]:
    spec = owner.job.spec
    yield _object(owner, "v1", "ServiceAccount", owner.name, automountServiceAccountToken=False)
    yield _trainer_service(owner)
    yield from _claim(owner, Role.TRAINER, names.trainer_name(owner.name), spec.trainer.storage)
    if wants_engines(spec):
        yield _manager_service(owner)
        yield from _claim(owner, Role.MANAGER, names.manager_service(owner.name), spec.manager.storage)
    if spec.pod_disruption_budget.trainer == "Auto":
        yield _budget(owner)
    if spec.network_policy.mode == "Isolated":
        yield from network_policies(owner)


def _object(owner: Owner, version: str, kind: str, name: str, role: Role | None = None, **fields: object) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": owner.metadata(name, role), **fields}


def _selector(owner: Owner, role: Role) -> Fields:
    return {names.LABEL_JOB: owner.name, names.LABEL_ROLE: role.value}


def _manager_service(owner: Owner) -> Object:
    """Only a manager that answers gets connections, so that peers retry instead of talking to one that replays."""
    ports = (("http", owner.job.spec.manager.port), ("agents", names.AGENTS_PORT), ("trainer", names.TRAINER_PORT))
    spec = {"type": "ClusterIP", "selector": _selector(owner, Role.MANAGER), "ports": [_port(*port) for port in ports]}
    return _object(owner, "v1", "Service", names.manager_service(owner.name), Role.MANAGER, spec=spec)


def _trainer_service(owner: Owner) -> Object:
    """Headless: ranks find each other by name before they are ready."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": _selector(owner, Role.TRAINER),
        "ports": [_port("weights", names.PUBLISHER_PORT)],
    }
    return _object(owner, "v1", "Service", names.trainer_name(owner.name), Role.TRAINER, spec=spec)


def _port(name: str, port: int) -> Fields:
    return {"name": name, "port": port, "targetPort": port, "protocol": "TCP"}


def _claim(owner: Owner, role: Role, name: str, storage: TrainerStorage | JournalStorage) -> Iterator[Object]:
    if storage.ephemeral or storage.claim_name is not None:
        return
    spec: Fields = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": storage.size}}}
    if storage.storage_class_name is not None:
        spec["storageClassName"] = storage.storage_class_name
    yield _object(owner, "v1", "PersistentVolumeClaim", name, role, spec=spec)


def _budget(owner: Owner) -> Object:
    """An integer: percentages need a controller with a scale, which our job has for its rollouts."""
    spec = {
        "minAvailable": owner.job.spec.trainer.replicas,
        "selector": {"matchLabels": _selector(owner, Role.TRAINER)},
        # A trainer that is not ready protects nothing, and must not hold up its node.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    name = names.trainer_name(owner.name)
    return _object(owner, "policy/v1", "PodDisruptionBudget", name, Role.TRAINER, spec=spec)
