"""`spec.trainer`: the learner on reserved devices."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from polyrl.manifest.base import BY_VALUE, CLUSTER_ONLY, ManifestModel
from polyrl.manifest.cluster import PodTemplate, TrainerStorage


class TrainerBackend(StrEnum):
    """What runs the trainer's pods."""

    JOB = "Job"
    """An Indexed Job; each rank restarts by itself."""
    JOB_SET = "JobSet"
    """A JobSet; all ranks restart together."""
    EXTERNAL = "External"
    """Nothing: the trainer runs elsewhere, and the operator looks after rollouts only."""


class TrainerCapacity(StrEnum):
    """What machines the trainer accepts."""

    ON_DEMAND = "OnDemand"
    ANY = "Any"


class TrainerSpec(ManifestModel):
    """The learner on reserved devices."""

    replicas: Annotated[int, Field(ge=1, le=512)] = 1
    """Trainer pods, one rank group each. Immutable unless suspended: ranks agree on their number when they start."""
    reserved_engine: bool = True
    """An engine on the trainer's own devices generates while the learner waits, so that a step never needs spot."""
    backend: Annotated[TrainerBackend, BY_VALUE, CLUSTER_ONLY] = TrainerBackend.JOB
    """What runs the trainer's pods. Immutable."""
    capacity: Annotated[TrainerCapacity, BY_VALUE, CLUSTER_ONLY] = TrainerCapacity.ON_DEMAND
    """OnDemand keeps the trainer off spot machines by the affinity of `rollout.capacity.preset`."""
    template: Annotated[PodTemplate, CLUSTER_ONLY] | None = None
    """Pod of one trainer rank; default: the operator's own image with no devices. An initContainer `reserved` adds to
    the reserved engine's sidecar, such as a share of the trainer's devices. Immutable unless suspended."""
    storage: Annotated[TrainerStorage, CLUSTER_ONLY] = TrainerStorage()
    """Where checkpoints and metrics lie; a local run has its folder. Immutable."""
