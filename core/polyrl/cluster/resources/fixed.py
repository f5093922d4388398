"""The children that a job has whatever happens: ServiceAccount, ConfigMap, Services, claims, budget, network rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.cluster.resources.owner import Owner, hash_of, with_content_hash
from polyrl.cluster.resources.template import Fields
from polyrl.control import Endpoints
from polyrl.manifest.cluster import Egress, JournalStorage, TrainerStorage
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


DNS_PORT: Final = 53
METADATA: Final[Fields] = {"ipBlock": {"cidr": "169.254.169.254/32"}}
"""Where AWS, GCP and Azure tell a machine that it will be taken away."""
METADATA_PORT: Final = 80


def network_policies(owner: Owner) -> tuple[Object, ...]:
    """One NetworkPolicy for each role that has pods."""
    spec = owner.job.spec
    outside = [_DNS, *(_to(egress) for egress in spec.network_policy.extra_egress)]
    trainer, rollout = _pods(owner, Role.TRAINER), _pods(owner, Role.ROLLOUT)
    if not wants_engines(spec):
        return (_policy(owner, Role.TRAINER, [], outside),)
    manager = _pods(owner, Role.MANAGER)
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": dict(names.OPERATOR_LABELS)}}
    to_manager = [
        _from([trainer, rollout], names.AGENTS_PORT),
        _from([trainer], names.TRAINER_PORT),
        _from([operator], spec.manager.port),
    ]
    if port := owner.settings.manager_metrics_port:
        # Whoever opened the port to Prometheus did not say where that is; there are only numbers behind it.
        to_manager.append({"ports": [{"protocol": "TCP", "port": port}]})
    from_trainer = [*outside, _egress([manager], names.AGENTS_PORT, names.TRAINER_PORT)]
    from_rollout = [*outside, _egress([manager], names.AGENTS_PORT), _egress([trainer], names.PUBLISHER_PORT)]
    if spec.rollout.capacity.preset != "None":
        from_rollout.append(_egress([METADATA], METADATA_PORT))
    return (
        _policy(owner, Role.MANAGER, to_manager, []),
        _policy(owner, Role.TRAINER, [_from([rollout], names.PUBLISHER_PORT)], from_trainer),
        _policy(owner, Role.ROLLOUT, [], from_rollout),
    )


_DNS: Final[Fields] = {"ports": [{"protocol": protocol, "port": DNS_PORT} for protocol in ("UDP", "TCP")]}
"""To anywhere: where a cluster's DNS listens differs too much to be named."""


def _policy(owner: Owner, role: Role, ingress: list[Fields], egress: list[Fields]) -> Object:
    rules = {"policyTypes": ["Ingress", "Egress"], "ingress": ingress, "egress": egress}
    name = f"{owner.name}-{role.value}"
    return _object(owner, "networking.k8s.io/v1", "NetworkPolicy", name, role, spec=_pods(owner, role) | rules)


def _pods(owner: Owner, role: Role) -> Fields:
    return {"podSelector": {"matchLabels": _selector(owner, role)}}


def _from(peers: list[Fields], *ports: int) -> Fields:
    return {"from": peers, "ports": _tcp(*ports)}


def _egress(peers: list[Fields], *ports: int) -> Fields:
    return {"to": peers, "ports": _tcp(*ports)}


def _to(egress: Egress) -> Fields:
    to: Fields = {"to": [{"ipBlock": {"cidr": egress.cidr}}]}
    return to if egress.port is None else to | {"ports": _tcp(egress.port)}


def _tcp(*ports: int) -> list[Fields]:
    return [{"protocol": "TCP", "port": port} for port in ports]


def config_map(owner: Owner) -> Object:
    """ConfigMap with job.json and manager.json: what the job's workers read of it, and where the manager is. Immutable,
    named by its content, which is only what a worker acts on: a change of scaling, suspension or a template makes no
    new one."""
    data = {"job.json": _job(owner), "manager.json": _endpoints(owner)}
    name = names.config_map_name(owner.name, hash_of(data))
    return with_content_hash(_object(owner, "v1", "ConfigMap", name, immutable=True, data=data))


def _job(owner: Owner) -> str:
    """A PolyRLJob again, so that workers read on a cluster what they read on a laptop."""
    spec = owner.job.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    rollout, trainer = spec["rollout"], spec["trainer"]
    chosen = owner.job.spec.rollout.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    read = {
        "recipe": spec["recipe"],
        "trainer": {key: trainer[key] for key in ("replicas", "reservedEngine")},
        "rollout": {key: rollout[key] for key in ("engine", "drainSeconds")}
        | {key: chosen[key] for key in ("leaseSeconds", "lostAfterSeconds") if key in chosen}
        | {"capacity": {"preset": rollout["capacity"]["preset"]}},
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
