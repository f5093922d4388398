"""`PolyRLJob`: the whole manifest. The same value is read from a file on a laptop and from the API server on a cluster.

Read next: `recipe` (what is learned), `rollout` (what generates), `rules` (what must hold between fields).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from polyrl.manifest.base import Spec
from polyrl.manifest.recipe import Recipe
from polyrl.manifest.rollout import Engine, Fault

API_VERSION = "polyrl.dev/v1alpha1"
KIND = "PolyRLJob"


class Metadata(Spec):
    """The part of Kubernetes' ObjectMeta that we read; the rest is kept and ignored."""

    model_config = {**Spec.model_config, "extra": "allow"}

    name: Annotated[str, Field(min_length=1, max_length=46, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """At most 46 characters: pods and services add suffixes within a DNS label's 63."""
    namespace: str | None = None


class Rollout(Spec):
    """The fleet."""

    engine: Engine = Engine()
    replicas: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Start value of the fleet (scaling mode Gap), or its size (Manual, External); default: minReplicas, at least 1 if
    maxReplicas allows."""
    min_replicas: Annotated[int, Field(ge=0, le=1024)] = 0
    max_replicas: Annotated[int, Field(ge=0, le=1024)] = 1
    drain_seconds: Annotated[int, Field(ge=0, le=600)] = 20
    """Time a rollout gets to finish or hand back its samples after a notice."""


class Trainer(Spec):
    """The learner on reserved devices."""

    replicas: Annotated[int, Field(ge=1, le=512)] = 1
    reserved_engine: bool = True
    """An engine on the trainer's own devices generates while the learner waits for samples."""


class JobSpec(Spec):
    """What the user asks for."""

    recipe: Recipe
    trainer: Trainer = Trainer()
    rollout: Rollout = Rollout()
    fault_injection: list[Fault] = Field(default=[], max_length=64)
    """Faults that the run inflicts on itself; a drill, not a setting for production."""


class PolyRLJob(Spec):
    """One training run."""

    api_version: Literal["polyrl.dev/v1alpha1"]
    kind: Literal["PolyRLJob"]
    metadata: Metadata
    spec: JobSpec
    status: dict[str, Any] | None = None
    """Written by the operator; ignored when read from a file."""
