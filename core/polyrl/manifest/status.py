"""`status`: what the operator reports; everything in it can be rebuilt. Whole numbers only, as Kubernetes wants them.

Times are RFC 3339 text, durations milliseconds, money millionths of `pricing.currency`. Every list is bounded, so that
the whole stays below 16 KiB with a thousand pods. Fields that a newer operator wrote are ignored, not refused.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from polyrl.manifest.base import BY_VALUE, ManifestModel

Counter = Annotated[int, Field(ge=0, le=2**63 - 1)]
Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Text = Annotated[str, Field(max_length=1024)]


class StatusPart(ManifestModel):
    """Base of all parts of the status."""

    model_config = ConfigDict(extra="ignore")


class RunState(StrEnum):
    """The conditions in one word, for people; machines read conditions."""

    PENDING = "Pending"
    """The trainer has not been ready yet."""
    RUNNING = "Running"
    """The trainer is ready; zero rollouts are no fault."""
    DEGRADED = "Degraded"
    """The trainer was ready and is not now, or missing rollouts fail at every start."""
    SUSPENDED = "Suspended"
    """`spec.suspend` is set."""
    COMPLETE = "Complete"
    """The trainer ended with success."""
    FAILED = "Failed"
    """It cannot go on; `failure` says why."""


class Condition(StatusPart):
    """A Kubernetes condition."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    """Accepted, TrainerReady, RolloutAvailable, Progressing, CapacityLimited, ScalingActive, ScalingLimited,
    Disrupting, Suspended, Complete or Failed."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(max_length=1024)] = ""
    """One CamelCase word for machines."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """One sentence for people."""
    last_transition_time: Time
    """When status last flipped."""
    observed_generation: Counter = 0
    """Generation of the spec that was last observed."""


class ManagerSummary(StatusPart):
    """What the manager last reported."""

    endpoint: Text = ""
    """Address of its HTTP API."""
    last_contact_time: Time | None = None
    """When it last answered."""
    weight_version: Annotated[int, Field(ge=-1, le=2**63 - 1)] = -1
    """Newest published weight version; -1 before the first."""
    step: Counter = 0
    """RL step under way."""
    step_time: Time | None = None
    """When that number was first seen."""
    created: Counter = 0
    """Manager pods made so far; the newest one's name ends in it."""


class TrainerStatus(StatusPart):
    """The trainer's pods."""

    name: Text = ""
    """Name of the Job."""
    replicas: Counter = 0
    """Pods wanted."""
    ready: Counter = 0
    """Pods ready."""
    active: Counter = 0
    """Pods that exist and have not ended."""
    failed: Counter = 0
    """Pods that failed."""
    restarts: Counter = 0
    """Restarts by the trainer's own fault; these count towards backoffLimit."""
    disruptions: Counter = 0
    """Restarts by the cluster's fault."""


class PoolStatus(StatusPart):
    """One source of machines."""

    name: Literal["spot", "on-demand"]
    """Which."""
    state: Literal["Available", "BackingOff"] = "Available"
    """Whether new pods are asked of it."""
    backoff_until: Time | None = None
    """When it is tried again."""
    consecutive_failures: Counter = 0
    """Pods in a row that it did not place."""
    last_reason: Text = ""
    """Why the last one was not placed."""
    limited_since: Time | None = None
    """Since when it has not given all that was asked of it."""
    failed_starts: Counter = 0
    """Rollouts in a row that it placed and that failed before they registered."""
    last_failure_time: Time | None = None
    """When a rollout of it last failed."""


class RolloutStatus(StatusPart):
    """The fleet."""

    replicas: Counter = 0
    """Pods that exist; read by the scale subresource."""
    ready_replicas: Counter = 0
    """Pods ready."""
    registered_replicas: Counter = 0
    """Rollouts known to the manager."""
    desired_replicas: Counter = 0
    """Rollouts wanted now."""
    pending_replicas: Counter = 0
    """Pods without a node."""
    draining_replicas: Counter = 0
    """Rollouts under a notice."""
    spot_replicas: Counter = 0
    """Pods on spot capacity."""
    on_demand_replicas: Counter = 0
    """Pods on on-demand capacity."""
    updated_replicas: Counter = 0
    """Pods of the newest template."""
    selector: Text = ""
    """Label selector of the pods; read by the scale subresource."""
    preemptions: Counter = 0
    """Rollouts taken away."""
    failures: Counter = 0
    """Rollouts that failed by themselves."""
    created: Counter = 0
    """Rollouts made so far; the newest one's name ends in it."""
    last_preemption_time: Time | None = None
    """When a rollout was last taken away."""
    pools: list[PoolStatus] = Field(default=[], max_length=2)
    """Sources of machines."""


class ScalingStatus(StatusPart):
    """The last decision on the fleet's size."""

    last_step: Counter = 0
    """Step it was measured on."""
    last_step_time: Time | None = None
    """When that measurement was first seen."""
    train_millis: Counter = 0
    """Training time of that step."""
    rollout_millis: Counter = 0
    """Rollout time of that step."""
    gap_millis: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] = 0
    """Rollout time minus training time."""
    seed_millis: Counter = 0
    """Time in which the reserved engines generated before they handed over."""
    recommended_replicas: Counter = 0
    """What the measurement asks for, before limits."""
    window: list[Counter] = Field(default=[], max_length=100)
    """What the newest steps asked for, the last one newest: as many as scaling.gap looks back on."""
    last_scale_time: Time | None = None
    """When the size last changed."""
    last_change: Annotated[int, Field(ge=-1024, le=1024)] = 0
    """By how many that raised it; below 0 where it fell."""
    last_reason: Text = ""
    """The decision as a sentence."""


class DisruptionKind(StrEnum):
    """Why a pod is taken away, as the status names it: the most telling first."""

    SPOT = "SpotInterruption"
    """The cloud takes a spot machine back."""
    LOST = "NodeLost"
    """The machine is gone, or nothing on it answers any more."""
    DRAIN = "NodeDrain"
    """The machine is being emptied: an autoscaler, maintenance, a shutdown."""
    EVICTION = "Eviction"
    """The pod was evicted, or made room for one of higher priority."""
    DELETED = "PodDeleted"
    """Somebody other than us deleted the pod."""
    UNKNOWN = "Unknown"
    """It hands its work over or ended, and no signal says why."""


class Disruption(StatusPart):
    """One rollout that was taken away."""

    pod_name: Text
    """Name of the pod."""
    pod_uid: Annotated[str, Field(max_length=64, alias="podUID")]
    """UID of the pod."""
    node_name: Text = ""
    """Its node."""
    reason: Annotated[DisruptionKind, BY_VALUE] = DisruptionKind.UNKNOWN
    """Why, as far as the cluster reported."""
    notice_time: Time | None = None
    """When the first sign of it was seen."""
    delete_time: Time | None = None
    """When the pod was gone."""
    notice_millis: Counter = 0
    """Time between the two."""


class Cost(StatusPart):
    """Cost so far, in millionths of pricing.currency."""

    reserved_micros: Counter = 0
    """Trainer pods."""
    spot_micros: Counter = 0
    """Rollouts on spot capacity."""
    on_demand_micros: Counter = 0
    """Rollouts on on-demand capacity."""
    accounted_time: Time | None = None
    """Until when."""


class Failure(StatusPart):
    """Why the job failed."""

    reason: Text
    """One CamelCase word."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """One sentence."""
    exit_code: Annotated[int, Field(ge=0, le=255)] | None = None
    """Exit status of the pod that decided it."""
    pod_name: Text = ""
    """That pod."""


class JobStatus(StatusPart):
    """What the operator reports; counters only grow within one runID."""

    observed_generation: Counter = 0
    """Generation of the spec that was last observed."""
    state: Annotated[RunState, BY_VALUE] = RunState.PENDING
    """The conditions in one word."""
    conditions: list[Condition] = Field(default=[], max_length=16)
    """One per type."""
    start_time: Time | None = None
    """When the job first ran."""
    completion_time: Time | None = None
    """When it ended."""
    last_suspend_time: Time | None = None
    """When it was last suspended."""
    last_resume_time: Time | None = None
    """When it last began to run, or went on."""
    active_millis: Counter = 0
    """Running time before that, time suspended left out."""
    run_id: Annotated[str, Field(max_length=64, alias="runID")] = ""
    """The job's UID: what the journal, checkpoints and counters belong to, for as long as the job is there."""
    manager: ManagerSummary = ManagerSummary()
    """What the manager last reported."""
    trainer: TrainerStatus = TrainerStatus()
    """The trainer's pods."""
    rollout: RolloutStatus = RolloutStatus()
    """The fleet."""
    scaling: ScalingStatus = ScalingStatus()
    """The last decision on the fleet's size."""
    cost: Cost = Cost()
    """Cost so far."""
    recent_disruptions: list[Disruption] = Field(default=[], max_length=10)
    """Newest last."""
    failure: Failure | None = None
    """Why the job failed."""

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type; None when there is none."""
        return next((known for known in self.conditions if known.type == kind), None)
