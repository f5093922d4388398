"""Who may talk to a job's pods, and to whom they may: NetworkPolicies, which the cluster's network plugin enforces.

    operator  -> manager   its HTTP port; from the operator's own namespace
    trainer   -> manager   both planes
    rollout   -> manager   agents' plane                     -> trainer    weights
    rollout  <-> rollout   chunks of weights, unless `rollout.weightExchange` is Never
    trainer, rollout -> the cluster's DNS, `extraEgress`
    trainer   -> its other pods  any TCP port, of several pods: those of gloo and NCCL are drawn by the kernel
    trainer   -> public addresses by HTTPS, where the recipe needs them (`publicHttps`)
    rollout   -> the machine's metadata service, where `rollout.capacity.metadataService` asks for it

Policies only add up, so whoever needs a flow that no field describes lays one of his own over the same labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Network, IPv6Address, IPv6Network
from typing import Final

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.cluster.resources.owner import Owner
from polyrl.cluster.resources.template import Fields
from polyrl.manifest.cluster import Egress
from polyrl.manifest.recipe import RecipeSpec
from polyrl.manifest.spec import JobSpec
from polyrl.weights.lending import FIRST_PORT, LAST_PORT
from polyrl.worker import Role, exchanges_weights, wants_engines

DNS_PORTS: Final = (53, 5353)
"""Rules see the port of the pod: 53, or 5353 behind OpenShift's Service."""
METADATA: Final[Fields] = {"ipBlock": {"cidr": "169.254.169.254/32"}}
"""Where AWS, GCP and Azure tell a machine that it will be taken away, and what accounts it has."""
METADATA_PORT: Final = 80
HTTPS_PORT: Final = 443
PRIVATE: Final = ["10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"]
NAT64: Final = IPv6Address("64:ff9b::")
"""A gateway takes the last 32 bits after this prefix for an IPv4 address (RFC 6052)."""
NAT64_LOCAL: Final = "64:ff9b:1::/48"
"""For an operator's own use (RFC 8215): what it leads to is nobody's to know."""


def _by_nat64(cidr: str) -> str:
    """The range as IPv6 has it through a gateway."""
    network = IPv4Network(cidr)
    return str(IPv6Network((int(NAT64) + int(network.network_address), 96 + network.prefixlen)))


PRIVATE_V6: Final = ["fc00::/7", "fe80::/10", NAT64_LOCAL, *map(_by_nat64, PRIVATE)]
PUBLIC: Final[list[Fields]] = [
    {"ipBlock": {"cidr": "0.0.0.0/0", "except": PRIVATE}},
    {"ipBlock": {"cidr": "::/0", "except": PRIVATE_V6}},
]
"""The internet without private, shared, loopback and link-local ranges (RFC 1918, 6598, 4193), where clusters live and
metadata services are, by NAT64 neither. A Hub's addresses change by the hour, so they cannot be listed."""
ANY_TCP: Final = {"protocol": "TCP"}
"""What learns together speaks on ports that nobody knows before."""
NAMESPACE_LABEL: Final = "kubernetes.io/metadata.name"
"""On every namespace, set by the API server itself."""


def network_policies(owner: Owner) -> tuple[Object, ...]:
    """One NetworkPolicy for each role that has pods."""
    spec = owner.job.spec
    outside = [_dns(owner), *(_to(egress) for egress in spec.network_policy.extra_egress)]
    from_trainer = [*outside, *([_egress(PUBLIC, HTTPS_PORT)] if _needs_public(spec) else [])]
    trainer, rollout, manager = (_pods(owner, role) for role in (Role.TRAINER, Role.ROLLOUT, Role.MANAGER))
    to_trainer = []
    if spec.trainer.replicas > 1:
        from_trainer.append({"to": [trainer], "ports": [ANY_TCP]})
        to_trainer.append({"from": [trainer], "ports": [ANY_TCP]})
    if not wants_engines(spec):
        return (_policy(owner, Role.TRAINER, to_trainer, from_trainer),)
    from_trainer.append(_egress([manager], names.AGENTS_PORT, names.TRAINER_PORT))
    from_rollout = [*outside, _egress([manager], names.AGENTS_PORT), _egress([trainer], names.PUBLISHER_PORT)]
    to_rollout: list[Fields] = []
    if spec.rollout.mooncake is not None:
        # Rollouts dial: the engine beside each of them listens too, and nobody reaches it.
        lent = [{"protocol": "TCP", "port": FIRST_PORT, "endPort": LAST_PORT}]
        from_rollout.append({"to": [trainer], "ports": lent})
        to_trainer.append({"from": [rollout], "ports": lent})
    if exchanges_weights(spec, in_pods=True):
        from_rollout.append(_egress([rollout], names.EXCHANGE_PORT))
        to_rollout.append(_from([rollout], names.EXCHANGE_PORT))
    if spec.rollout.capacity.metadata_service:
        from_rollout.append(_egress([METADATA], METADATA_PORT))
    return (
        _policy(owner, Role.MANAGER, list(_to_manager(owner, trainer, rollout)), []),
        _policy(owner, Role.TRAINER, [_from([rollout], names.PUBLISHER_PORT), *to_trainer], from_trainer),
        _policy(owner, Role.ROLLOUT, to_rollout, from_rollout),
    )


def _to_manager(owner: Owner, trainer: Fields, rollout: Fields) -> Iterator[Fields]:
    operator = _in_namespace(owner.settings.operator_namespace, podSelector={"matchLabels": names.OPERATOR_LABELS})
    yield _from([trainer, rollout], names.AGENTS_PORT)
    yield _from([trainer], names.TRAINER_PORT)
    yield _from([operator], owner.job.spec.manager.port)
    if port := owner.settings.manager_metrics_port:
        # Whoever opened the port to Prometheus did not say where that is; there are only numbers behind it.
        yield {"ports": _tcp(port)}


def _dns(owner: Owner) -> Fields:
    """The cluster's own only: a resolver elsewhere is a way out for whatever can be written as a name."""
    addresses = [{"ipBlock": {"cidr": cidr}} for cidr in owner.settings.dns_addresses]
    ports = [{"protocol": protocol, "port": port} for port in DNS_PORTS for protocol in ("UDP", "TCP")]
    return {"to": [_in_namespace(owner.settings.dns_namespace), *addresses], "ports": ports}


def _needs_public(spec: JobSpec) -> bool:
    match spec.network_policy.public_https:
        case "Auto":
            return _names_a_public_service(spec.recipe)
        case choice:
            return choice == "Always"


def _names_a_public_service(recipe: RecipeSpec) -> bool:
    """A model or rows that are fetched, or Weights & Biases; an MLflow server is usually the cluster's own, without a
    public address."""
    wandb = recipe.logging.wandb
    return bool(recipe.fetchable) or (wandb is not None and wandb.mode != "offline")


def _policy(owner: Owner, role: Role, ingress: list[Fields], egress: list[Fields]) -> Object:
    rules = {"policyTypes": ["Ingress", "Egress"], "ingress": ingress, "egress": egress}
    name = f"{owner.name}-{role.value}"
    return owner.object("networking.k8s.io/v1", "NetworkPolicy", name, role, spec=_pods(owner, role) | rules)


def _pods(owner: Owner, role: Role) -> Fields:
    return {"podSelector": {"matchLabels": owner.selector(role)}}


def _in_namespace(namespace: str, **pods: Fields) -> Fields:
    return {"namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: namespace}}, **pods}


def _from(peers: list[Fields], *ports: int) -> Fields:
    return {"from": peers, "ports": _tcp(*ports)}


def _egress(peers: list[Fields], *ports: int) -> Fields:
    return {"to": peers, "ports": _tcp(*ports)}


def _to(egress: Egress) -> Fields:
    to: Fields = {"to": [{"ipBlock": {"cidr": egress.cidr}}]}
    return to if egress.port is None else to | {"ports": _tcp(egress.port)}


def _tcp(*ports: int) -> list[Fields]:
    return [{"protocol": "TCP", "port": port} for port in ports]
