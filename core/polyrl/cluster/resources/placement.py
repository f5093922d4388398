"""Which machines a pod may run on: the labels and taints of each platform's spot and on-demand machines, as a table.

`karpenter.sh/disrupted` is tolerated by nothing of ours: a pod that tolerates it is never drained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from polyrl.manifest.job import JobSpec
from polyrl.manifest.spec import TrainerCapacity
from polyrl.sample import Pool

Requirement: TypeAlias = dict[str, Any]
"""A Kubernetes NodeSelectorRequirement."""
Toleration: TypeAlias = dict[str, Any]

ROLLOUT_TOLERATION_S: Final = 20
"""Seconds that a rollout stays bound to a node that is not heard: the usual 300 hide a dead spot machine."""
KEPT_TOLERATION_S: Final = 60
"""The same for manager and trainer, whose loss costs more than a short hiccup of their node does."""
SILENT_NODE: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


@dataclass(frozen=True)
class Placement:
    """Where a pod may run."""

    required: tuple[Requirement, ...] = ()
    """All must hold of the node."""
    tolerations: tuple[Toleration, ...] = ()


@dataclass(frozen=True)
class Preset:
    """One platform."""

    spot: tuple[Requirement, ...] = ()
    on_demand: tuple[Requirement, ...] = ()
    spot_tolerations: tuple[Toleration, ...] = ()
    gpu_tolerations: tuple[Toleration, ...] = ()
    """For pods with devices, which are all but the manager's."""


def _in(key: str, *values: str) -> Requirement:
    return {"key": key, "operator": "In", "values": list(values)}


def _absent(key: str) -> Requirement:
    return {"key": key, "operator": "DoesNotExist"}


def _tolerated(key: str, value: str) -> Toleration:
    return {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"}


GPU: Final[Toleration] = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
GKE_SPOT: Final = "cloud.google.com/gke-spot"
AKS_SPOT: Final = "kubernetes.azure.com/scalesetpriority"

PRESETS: Final[dict[str, Preset]] = {
    "None": Preset(),
    "Karpenter": Preset(
        spot=(_in("karpenter.sh/capacity-type", "spot"),),
        on_demand=(_in("karpenter.sh/capacity-type", "on-demand", "reserved"),),
        gpu_tolerations=(GPU,),
    ),
    "GKE": Preset(
        spot=(_in(GKE_SPOT, "true"),),
        on_demand=(_absent(GKE_SPOT), _absent("cloud.google.com/gke-preemptible")),
        spot_tolerations=(_tolerated(GKE_SPOT, "true"),),
        gpu_tolerations=(GPU,),
    ),
    "AKS": Preset(
        spot=(_in(AKS_SPOT, "spot"),), on_demand=(_absent(AKS_SPOT),), spot_tolerations=(_tolerated(AKS_SPOT, "spot"),)
    ),
    "EKSManaged": Preset(
        spot=(_in("eks.amazonaws.com/capacityType", "SPOT"),),
        on_demand=(_in("eks.amazonaws.com/capacityType", "ON_DEMAND"),),
        gpu_tolerations=(GPU,),
    ),
}
"""By `rollout.capacity.preset`; labels and taints as the platforms document them."""


def rollout_placement(spec: JobSpec, pool: Pool) -> Placement:
    """Where a rollout of `pool` may run."""
    preset, tolerations = _preset(spec), _silent_node_tolerations(ROLLOUT_TOLERATION_S)
    if pool is Pool.SPOT:
        return Placement(preset.spot, (*preset.spot_tolerations, *preset.gpu_tolerations, *tolerations))
    return Placement(preset.on_demand, (*preset.gpu_tolerations, *tolerations))


def trainer_placement(spec: JobSpec) -> Placement:
    """Where a trainer rank may run: on-demand nodes, or whatever a rollout may run on as well."""
    preset, tolerations = _preset(spec), _silent_node_tolerations(KEPT_TOLERATION_S)
    if spec.trainer.capacity is TrainerCapacity.ANY:
        return Placement((), (*preset.spot_tolerations, *preset.gpu_tolerations, *tolerations))
    return Placement(preset.on_demand, (*preset.gpu_tolerations, *tolerations))


def manager_placement(spec: JobSpec) -> Placement:
    """Where the manager may run: on-demand nodes, without devices."""
    return Placement(_preset(spec).on_demand, _silent_node_tolerations(KEPT_TOLERATION_S))


def _preset(spec: JobSpec) -> Preset:
    return PRESETS[spec.rollout.capacity.preset]


def _silent_node_tolerations(seconds: int) -> tuple[Toleration, ...]:
    vanished = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}
    return tuple({"key": key, **vanished} for key in SILENT_NODE)
