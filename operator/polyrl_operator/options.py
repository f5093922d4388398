"""What an operator is started with. Every field but the last two is a flag of `python -m polyrl_operator`, and is also
read from the environment as POLYRL_<FLAG>."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

from typer import Option

from polyrl.cluster.resources.owner import Settings
from polyrl_operator.informer.watch import INACTIVITY_S
from polyrl_operator.leader import DEFAULT_TERMS, Terms


def _identity() -> str:
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"


@dataclass(frozen=True)
class Options:
    """Of one replica."""

    manager_image: Annotated[str, Option(help="Image of managers.")]
    trainer_image: Annotated[str, Option(help="Default image of trainers.")]
    rollout_image: Annotated[str, Option(help="Default image of rollouts.")]
    namespace: Annotated[list[str] | None, Option(help="Namespace whose jobs are run; repeatable.")] = None
    all_namespaces: Annotated[bool, Option(help="Run jobs of all.")] = False
    nodes: Annotated[bool, Option(help="Watch nodes and NodeClaims.")] = True
    lease_namespace: Annotated[str, Option(help="Of the Lease.")] = "default"
    lease_name: Annotated[str, Option(help="Of the Lease.")] = "polyrl-operator"
    image_pull_policy: str = "IfNotPresent"
    cluster_domain: str = "cluster.local"
    trainer_priority_class: str = ""
    rollout_priority_class: str = ""
    host: Annotated[str, Option(help="Address of both ports.")] = "0.0.0.0"
    metrics_port: int = 8080
    health_port: int = 8081
    """0: one that is free."""
    kubeconfig: Annotated[Path | None, Option(envvar="KUBECONFIG", help="Outside a cluster; default: the user's.")] = (
        None
    )
    watch_silence: Annotated[float, Option(min=1, help="Seconds after which a silent watch begins anew.")] = (
        INACTIVITY_S
    )
    log_level: Annotated[str, Option(help="debug, info, warning, error.")] = "info"
    identity: str = field(default_factory=_identity)
    """Of this replica in the Lease and in Events: its pod's name."""
    terms: Terms = DEFAULT_TERMS

    @property
    def settings(self) -> Settings:
        """What jobs' objects depend on."""
        return Settings(**{one.name: getattr(self, one.name) for one in fields(Settings)})

    @property
    def namespaces(self) -> tuple[str, ...] | None:
        """None: all."""
        return None if self.all_namespaces else tuple(dict.fromkeys(self.namespace or ()))
