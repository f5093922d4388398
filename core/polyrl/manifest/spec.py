"""`spec`: what the user asks for, one field per part; and `spec.trainer`, the learner on reserved devices."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, model_validator

from polyrl.manifest.base import BY_VALUE, CLUSTER_ONLY, INT32_MAX, Count, ManifestModel, Name
from polyrl.manifest.cluster import (
    FailurePolicy,
    ManagerSpec,
    NetworkPolicySpec,
    PodDisruptionBudgetSpec,
    PodTemplate,
    TelemetrySpec,
    TrainerStorage,
    gpus_asked_for,
)
from polyrl.manifest.recipe import RecipeSpec
from polyrl.manifest.rollout import EngineSpec, FaultSpec, RolloutSpec
from polyrl.manifest.scaling import PricingSpec, ScalingSpec

OPERATOR = "polyrl.dev/operator"


class TrainerCapacity(StrEnum):
    """What machines the trainer accepts."""

    ON_DEMAND = "OnDemand"
    """On-demand machines only."""
    ANY = "Any"
    """Spot machines as well."""


class ReservedSleep(StrEnum):
    """When the reserved engine gives its GPU's memory back while the learner learns. Only SGLang's does, by its memory
    saver; weights and cache of one that slept are loaded and read anew."""

    AUTO = "auto"
    """Where both do not fit, by what was measured of the GPU; never on a CPU."""
    ALWAYS = "always"
    """Before every batch."""
    NEVER = "never"
    """Both must fit beside each other."""


class CpuOffload(StrEnum):
    """What the host's memory holds instead of the GPU; the numbers are the same."""

    NONE = "none"
    """Nothing."""
    OPTIMIZER = "optimizer"
    """The optimizer's moments: each step moves those of one tensor after the other to the GPU and back."""
    ALL = "all"
    """Weights, gradients and optimizer, a layer's weights on the GPU while it computes: between passes the GPU holds
    nothing, and each pass moves all weights."""


class FsdpSpec(ManifestModel):
    """How the learner's processes hold the model (FSDP2)."""

    cpu_offload: Annotated[CpuOffload, BY_VALUE] = CpuOffload.NONE
    """What is in the host's memory instead of the GPU's. Works with one process too."""
    dp_replicate: Annotated[int, Field(ge=1, le=512)] = 1
    """Copies of the model, each in shards over its part of the processes (HSDP): layers are gathered within a copy, and
    copies add their gradients. Must divide `trainer.replicas` x `processesPerPod`; with the number of pods a copy is a
    pod's. 1 cuts one model over all of them."""


_PROCESSES = ("processesPerPod", "processes_per_pod")


class TrainerSpec(ManifestModel):
    """The learner on reserved devices."""

    replicas: Annotated[int, Field(ge=1, le=512)] = 1
    """Pods of `processesPerPod` processes each that learn together; a local run has all of these processes on its
    machine. Immutable unless suspended: ranks agree on their number when they start."""
    processes_per_pod: int = Field(ge=1, le=64, default_factory=lambda: 1)
    """Processes that learn together in one trainer pod, or on one machine, each on a GPU of its own and with a shard of
    weights, gradients and optimizer; default: the GPUs of the pod, which are the `nvidia.com/gpu` of the template's
    first container, and 1 where it names none and on one machine. Immutable unless suspended."""
    context_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that have each pass together, every one an equal slice of its tokens (Ulysses), so that longer samples
    fit; divides the learner's processes and the model's attention heads. Immutable unless suspended."""
    fsdp: FsdpSpec = FsdpSpec()
    """How they hold the model. Immutable unless suspended."""
    reserved_engine: bool = True
    """An engine on the trainer's own devices generates while the learner waits, so that a step never needs spot."""
    reserved_mem_fraction: Annotated[float, Field(ge=0.01, le=0.98)] | None = None
    """`rollout.engine.memFraction` of the reserved engine, which leaves the rest of its GPU to the learner; default:
    that of rollouts. Immutable unless suspended."""
    reserved_sleep: Annotated[ReservedSleep, BY_VALUE] = ReservedSleep.AUTO
    """Whether the reserved engine gives its GPU's memory back while the learner learns. Immutable unless suspended."""
    grace_seconds: Annotated[int, Field(ge=10, le=3600)] = 20
    """From being asked to end (SIGTERM) to being killed. Within it, but for 5 s, the trainer finishes its mini-batch
    and saves; a save that would not be over by then, at the speed of the last ones, is not begun. Immutable unless
    suspended."""
    capacity: Annotated[TrainerCapacity, BY_VALUE, CLUSTER_ONLY] = TrainerCapacity.ON_DEMAND
    """OnDemand keeps the trainer off spot machines by the affinity of `rollout.capacity.preset`."""
    template: Annotated[PodTemplate, CLUSTER_ONLY] | None = None
    """Pod of one trainer rank; default: the operator's own image with no devices. Reserved engines are processes of its
    first container, one for each GPU of it, or group of `rollout.engine.tensorParallel`; for SGLang that container's
    image has it too. Immutable unless suspended."""
    storage: Annotated[TrainerStorage, CLUSTER_ONLY] = TrainerStorage()
    """Where checkpoints and metrics lie; a local run has its folder. Immutable."""

    @model_validator(mode="before")
    @classmethod
    def _a_process_for_each_gpu(cls, given: Any) -> Any:
        if not isinstance(given, dict) or any(given.get(name) is not None for name in _PROCESSES):
            return given
        gpus = gpus_asked_for(given.get("template"))
        return {**given, _PROCESSES[0]: gpus} if gpus else given

    @property
    def learner_processes(self) -> int:
        """Ranks of the learner, in all pods together; a local run has them beside each other."""
        return self.replicas * self.processes_per_pod

    @property
    def learner_is_group(self) -> bool:
        """Its model is in shards, if need be in one."""
        return self.learner_processes > 1 or self.fsdp.cpu_offload is CpuOffload.ALL


class JobSpec(ManifestModel):
    """What the user asks for. Rules between fields are checked by `PolyRLJob`, which holds this."""

    recipe: RecipeSpec
    """What is learned, from what, by which algorithm."""
    trainer: TrainerSpec = TrainerSpec()
    """The learner on reserved devices."""
    rollout: RolloutSpec = RolloutSpec()
    """The fleet that generates."""
    scaling: Annotated[ScalingSpec, CLUSTER_ONLY] = ScalingSpec()
    """How many rollouts there should be; a local run keeps `rollout.replicas`."""
    pricing: PricingSpec = PricingSpec()
    """What capacity costs; every run reports its cost where prices are given."""
    manager: Annotated[ManagerSpec, CLUSTER_ONLY] = ManagerSpec()
    """Where the manager, which holds every sample between prompt and gradient, is reached."""
    suspend: Annotated[bool, CLUSTER_ONLY] = False
    """True stops the trainer and all rollouts and keeps checkpoints, configuration and counters; false goes on."""
    managed_by: Annotated[Name, CLUSTER_ONLY] = OPERATOR
    """Controller in charge, as in Job; another value makes our operator leave the object alone. Immutable."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=INT32_MAX), CLUSTER_ONLY] | None = None
    """Seconds the job may run, time suspended left out; default: no limit. May be set once, or lowered."""
    ttl_seconds_after_finished: Annotated[Count, CLUSTER_ONLY] | None = None
    """Seconds a finished job's object stays; default: for ever. Its rollouts go at once in any case."""
    backoff_limit: Annotated[int, Field(ge=0, le=100)] = 3
    """Restarts of the trainer by its own fault before the job fails, each from the newest checkpoint; disruptions never
    count, and a trainer that says why it cannot go on is not restarted."""
    failure_policy: Annotated[FailurePolicy, CLUSTER_ONLY] = FailurePolicy()
    """Which ends of a trainer pod count."""
    network_policy: Annotated[NetworkPolicySpec, CLUSTER_ONLY] = NetworkPolicySpec()
    """Who may talk to this job's pods."""
    pod_disruption_budget: Annotated[PodDisruptionBudgetSpec, CLUSTER_ONLY] = PodDisruptionBudgetSpec()
    """What voluntary evictions must spare."""
    telemetry: Annotated[TelemetrySpec, CLUSTER_ONLY] = TelemetrySpec()
    """How the operator watches the manager."""
    fault_injection: list[FaultSpec] = Field(default=[], max_length=64)
    """Faults that a local run injects into itself; not for production. A cluster has its own."""

    @property
    def reserved_engine(self) -> EngineSpec:
        """An engine on the trainer's own devices: as rollouts have it, but for its share of memory."""
        fraction = self.trainer.reserved_mem_fraction
        engine = self.rollout.engine
        return engine if fraction is None else engine.model_copy(update={"mem_fraction": fraction})
