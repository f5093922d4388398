"""Which cluster: an external driver, else one that KUBECONFIG names, else kind.

Where none can be had, the caller says so.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from cluster.external_driver import ExternalCluster
from cluster.given_driver import GivenCluster
from cluster.kind_driver import KindCluster
from cluster.port import Cluster

DRIVER: Final = "POLYRL_CLUSTER_DRIVER"
KIND_NAME: Final = "polyrl"
KUBECONFIG: Final = Path(__file__).parents[3] / ".cluster" / "kubeconfig"
"""Of the kind cluster that `make cluster-up` makes."""


def choose_cluster() -> Cluster:
    """The bed that the environment names."""
    if driver := os.environ.get(DRIVER):
        return ExternalCluster(driver)
    given = os.environ.get("KUBECONFIG")
    if given and Path(given).resolve() != KUBECONFIG.resolve():
        return GivenCluster(Path(given))
    return KindCluster(KIND_NAME, KUBECONFIG)
