"""What an operator is started with. Read next: `app`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from polyrl.cluster.resources.owner import Settings
from polyrl_operator.informer.watch import SILENCE_S
from polyrl_operator.leader import DEFAULT_TERMS, Terms

METRICS_PORT: Final = 8080
HEALTH_PORT: Final = 8081


@dataclass(frozen=True)
class Options:
    """Of one replica."""

    settings: Settings
    namespaces: tuple[str, ...] | None
    """None: all."""
    lease_namespace: str
    identity: str
    """Of this replica in the Lease and in Events: its pod's name."""
    lease_name: str = "polyrl-operator"
    watch_nodes: bool = True
    host: str = "0.0.0.0"
    """What /metrics and /healthz listen on: the kubelet asks from outside the pod."""
    metrics_port: int = METRICS_PORT
    health_port: int = HEALTH_PORT
    """0: one that is free."""
    kubeconfig: Path | None = None
    """None: the pod's service account, or the user's default."""
    terms: Terms = DEFAULT_TERMS
    silence_s: float = SILENCE_S
    """After which a watch begins anew; after three such silences the operator is unhealthy."""
