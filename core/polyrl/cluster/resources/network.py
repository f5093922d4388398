"""Network rules of mode Isolated: the named flows of one job's pods, and nothing else.

    agents (rollouts, and the engine beside the trainer) -> manager 5001, trainer 5003
    trainer -> manager 5002            operator -> manager's HTTP port
    trainer, rollouts -> DNS, extraEgress; rollouts -> their cloud's metadata, where a preset names the cloud

One policy per role, because a policy selects one set of pods. The kubelet's probes are always let through.
Refuses to hold: authentication, which every socket has of its own. Read next: `fixed`.
"""

from __future__ import annotations

from typing import Final

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.cluster.resources.owner import Owner
from polyrl.cluster.resources.pods.template import Fields
from polyrl.manifest.cluster import Egress
from polyrl.worker import Role, wants_engines

DNS_PORT: Final = 53
METADATA: Final[Fields] = {"ipBlock": {"cidr": "169.254.169.254/32"}}
"""Where AWS, GCP and Azure tell a machine that it will be taken away."""
METADATA_PORT: Final = 80


def network_policies(owner: Owner) -> tuple[Object, ...]:
    """One per role that the job has pods of."""
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
    from_trainer = [*outside, _egress([manager], names.AGENTS_PORT, names.TRAINER_PORT)]
    from_rollout = [*outside, _egress([manager], names.AGENTS_PORT), _egress([trainer], names.PUBLISHER_PORT)]
    if spec.rollout.capacity.preset != "None":
        from_rollout.append(_egress([METADATA], METADATA_PORT))
    return (
        _policy(owner, Role.MANAGER, to_manager, []),
        _policy(owner, Role.TRAINER, [_from([rollout], names.PUBLISHER_PORT)], from_trainer),
        _policy(owner, Role.ROLLOUT, [], from_rollout),
    )


_DNS: Final[Fields] = {
    "ports": [{"protocol": "UDP", "port": DNS_PORT}, {"protocol": "TCP", "port": DNS_PORT}],
}
"""To anywhere: where a cluster's DNS listens differs too much to be named."""


def _policy(owner: Owner, role: Role, ingress: list[Fields], egress: list[Fields]) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": owner.metadata(f"{owner.name}-{role.value}", role),
        "spec": {
            "podSelector": _pods(owner, role)["podSelector"],
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": egress,
        },
    }


def _pods(owner: Owner, role: Role) -> Fields:
    return {"podSelector": {"matchLabels": {names.LABEL_JOB: owner.name, names.LABEL_ROLE: role.value}}}


def _from(peers: list[Fields], *ports: int) -> Fields:
    return {"from": peers, "ports": _tcp(*ports)}


def _egress(peers: list[Fields], *ports: int) -> Fields:
    return {"to": peers, "ports": _tcp(*ports)}


def _to(egress: Egress) -> Fields:
    to: Fields = {"to": [{"ipBlock": {"cidr": egress.cidr}}]}
    return to if egress.port is None else to | {"ports": _tcp(egress.port)}


def _tcp(*ports: int) -> list[Fields]:
    return [{"protocol": "TCP", "port": port} for port in ports]
