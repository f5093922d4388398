"""The one word with which a condition, or a failure, says why: for machines, and the head of the sentence for people.

docs/reference/cluster.md lists them by condition.
"""

from __future__ import annotations

from enum import StrEnum


class AcceptedReason(StrEnum):
    """Of the condition Accepted."""

    VALID = "Valid"
    """The job is understood, and the API server takes its pods."""
    CHECKING = "Checking"
    """The API server is being asked whether it takes them."""
    INVALID = "Invalid"
    """The object is not what this version understands."""
    UNSUPPORTED = "Unsupported"
    """It asks for something that this version cannot do yet."""
    INVALID_POD_TEMPLATE = "InvalidPodTemplate"
    """The API server refuses its pods."""
    IMMUTABLE_FIELD_CHANGED = "ImmutableFieldChanged"
    """The trainer's part was edited while the trainer runs."""


class ScalingReason(StrEnum):
    """Of the condition ScalingActive."""

    MEASURED = "Measured"
    """Steps are measured, and their gap moves the number."""
    WARM_UP = "WarmUp"
    """No step has been measured yet."""
    METRICS_STALE = "MetricsStale"
    """The last measured step is too long ago."""
    EXTERNAL = "External"
    """An autoscaler decides."""
    MANUAL = "Manual"
    """The user decides."""
    NOT_WANTED = "NotWanted"
    """The recipe generates nothing to train on."""
    IDLE = "Idle"
    """The job does not run, and keeps its number."""


class FailureReason(StrEnum):
    """Of the condition Failed, where the trainer's Job gives none."""

    DEADLINE_EXCEEDED = "DeadlineExceeded"
    """The job ran longer than its activeDeadlineSeconds."""
    TRAINER_FAILED = "TrainerFailed"
    """The trainer's Job failed."""


class ConditionReason(StrEnum):
    """Of the other conditions, in the order in which the reference lists these."""

    FINISHED = "Finished"
    """The job has ended."""
    SUSPENDED = "Suspended"
    """The job is suspended."""
    READY = "Ready"
    """The trainer is ready."""
    STARTING = "Starting"
    """The trainer starts."""
    DISRUPTED = "Disrupted"
    """The trainer's pod is taken away."""
    MANAGER_UNREACHABLE = "ManagerUnreachable"
    """The manager does not answer."""
    CRASH_LOOP = "CrashLoop"
    """The trainer failed and starts again."""
    REGISTERED = "Registered"
    """At least minReplicas rollouts serve, and at least one."""
    NOT_WANTED = "NotWanted"
    """No rollouts are desired."""
    BELOW_MINIMUM = "BelowMinimum"
    """Fewer than that serve, for no reason that needs anybody."""
    NO_CAPACITY = "NoCapacity"
    """No pool has machines."""
    ALL_PREEMPTED = "AllPreempted"
    """Every rollout was taken away."""
    FAILED_STARTS = "FailedStarts"
    """Rollouts fail one after the other before they register."""
    STEP_ADVANCED = "StepAdvanced"
    """A step is under way."""
    NOT_STARTED = "NotStarted"
    """No step is under way yet."""
    STALLED = "Stalled"
    """The step takes far longer than the last one."""
    ENOUGH = "Enough"
    """All requested capacity is there."""
    SPOT_UNAVAILABLE = "SpotUnavailable"
    """Spot machines are short; one probe waits for them."""
    BACKING_OFF = "BackingOff"
    """A pool is asked for nothing more for a while."""
    UNSCHEDULABLE = "Unschedulable"
    """Rollouts wait for a node."""
    QUOTA_EXCEEDED = "QuotaExceeded"
    """A ResourceQuota is used up."""
    REFUSED = "Refused"
    """The API server refuses rollouts."""
    WITHIN_BOUNDS = "WithinBounds"
    """The number is within minReplicas and maxReplicas."""
    TOO_MANY_REPLICAS = "TooManyReplicas"
    """More are asked for than maxReplicas."""
    TOO_FEW_REPLICAS = "TooFewReplicas"
    """Fewer are asked for than minReplicas."""
    UNDISTURBED = "Undisturbed"
    """No rollout is under a notice; else the reason is the notice's kind."""
    NOT_SUSPENDED = "NotSuspended"
    """`spec.suspend` is not set."""
    TRAINER_COMPLETE = "TrainerComplete"
    """The trainer is done."""
