"""The real Karpenter on the bed, ordering machines that are real: started by an executable of the bed's owner.

    POLYRL_KARPENTER_DRIVER up TYPES.json    Karpenter 1.x runs with its kwok provider and these instance types; each
                                             Node that it orders gets a machine with a kubelet and our images
    POLYRL_KARPENTER_DRIVER down             both end; machines that were ordered go

Neither is imitated: without the executable the tests are skipped, and say so.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

from cluster.port import BedFailed
from cluster.tools import Kubectl

DRIVER: Final = "POLYRL_KARPENTER_DRIVER"
TYPES: Final = Path(__file__).with_name("instance_types.json")
VERB_S: Final = 180.0

CAPACITY: Final = "karpenter.sh/capacity-type"
POOL: Final = "karpenter.sh/nodepool"


def drive(driver: str, verb: str, *args: str) -> None:
    """One verb. Raises BedFailed."""
    done = subprocess.run([driver, verb, *args], capture_output=True, text=True, timeout=VERB_S)
    if done.returncode:
        raise BedFailed(f"{driver} {verb}: exit {done.returncode}: {done.stderr.strip()[-2000:]}")


def ordered_nodes(kubectl: Kubectl, pool: str) -> dict[str, str]:
    """Nodes that a NodePool ordered and that are not on their way out: name and instance type."""
    found = kubectl.items("nodes", "-l", f"{POOL}={pool}")
    return {
        node["metadata"]["name"]: node["metadata"]["labels"]["node.kubernetes.io/instance-type"]
        for node in found
        if "deletionTimestamp" not in node["metadata"]
    }


def machines_in(kubectl: Kubectl, capacity: str) -> set[str]:
    """Names of nodes with this capacity type."""
    return {node["metadata"]["name"] for node in kubectl.items("nodes", "-l", f"{CAPACITY}={capacity}")}


def interrupt(kubectl: Kubectl, pool: str) -> None:
    """What a cloud's notice makes Karpenter do: it gives up the pool's NodeClaims, and drains their nodes."""
    kubectl("delete", "nodeclaims", "-l", f"{POOL}={pool}", "--wait=false")


def environment_driver() -> str:
    """The executable; empty when there is none."""
    return os.environ.get(DRIVER, "")
