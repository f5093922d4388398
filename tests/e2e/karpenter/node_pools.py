"""The NodePools of docs/how-to/spot-capacity.md, as they stand there but for the class of nodes and the wait.

There are no others: what is shown to readers is what is tested.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import yaml
from cluster.tools import Kubectl
from on_cluster.settings import ROOT

PAGE: Final = ROOT / "docs/how-to/spot-capacity.md"
SPOT, ON_DEMAND = "gpu-spot", "gpu-steady"
CLASS: Final = {"group": "karpenter.kwok.sh", "kind": "KWOKNodeClass", "name": "default"}
GPU: Final = "nvidia.com/gpu"

Object = dict[str, Any]


def node_pools(policy: str) -> list[Object]:
    """Both pools, by the kwok provider, empty nodes gone after seconds; machines with GPUs carry the usual taint."""
    block = re.search(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    pools = list(yaml.safe_load_all(block[1]))
    assert [pool["metadata"]["name"] for pool in pools] == [SPOT, ON_DEMAND]
    for pool in pools:
        pool["spec"]["template"]["spec"] |= {"nodeClassRef": CLASS, "taints": [{"key": GPU, "effect": "NoSchedule"}]}
        pool["spec"]["disruption"] |= {
            "consolidateAfter": "5s",
            "consolidationPolicy": policy,
            "budgets": [{"nodes": "100%"}],
        }
    return pools


def apply(kubectl: Kubectl, policy: str = "WhenEmpty") -> None:
    """Makes them be so."""
    node_class: Object = {
        "apiVersion": "karpenter.kwok.sh/v1alpha1",
        "kind": "KWOKNodeClass",
        "metadata": {"name": "default"},
    }
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": [node_class, *node_pools(policy)]})
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)


def limit_spot(kubectl: Kubectl, gpus: int) -> None:
    """How many GPUs of spot may be had; 0 is what a cloud without any feels like."""
    change = {"spec": {"limits": {GPU: str(gpus)}}}
    kubectl("patch", "nodepool", SPOT, "--type=merge", "-p", json.dumps(change))


def delete(kubectl: Kubectl) -> None:
    """Takes both away, and with them every node that they ordered."""
    kubectl("delete", "nodepool", SPOT, ON_DEMAND, "--ignore-not-found", "--timeout=120s", timeout_s=125)
