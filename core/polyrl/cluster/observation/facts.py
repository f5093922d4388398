"""What is observed of one job at one moment, as values. Times are Unix seconds, as the API server's timestamps are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from polyrl.manifest.job import PolyRLJob
from polyrl.manifest.status import JobStatus
from polyrl.sample import Pool
from polyrl.status import ManagerStatus
from polyrl.worker import Role


class PodPhase(StrEnum):
    """status.phase."""

    PENDING = "Pending"
    """Not on a node yet, or its containers do not run yet."""
    RUNNING = "Running"
    """At least one container runs, or is started again."""
    SUCCEEDED = "Succeeded"
    """All containers ended with status 0."""
    FAILED = "Failed"
    """All containers ended, at least one of them badly, or the kubelet ended or refused the pod."""


@dataclass(frozen=True)
class Exit:
    """How a container ended."""

    container: str
    code: int
    reason: str
    """The kubelet's word: Completed, Error, OOMKilled, ..."""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """One pod of the job. Slots, because an operator keeps one for each of thousands of pods."""

    name: str
    uid: str
    role: Role
    phase: PodPhase
    created_at: float
    pool: Pool | None = None
    """SPOT or ON_DEMAND for a rollout; None for others."""
    node: str = ""
    ip: str = ""
    """status.podIP; empty until the pod has one."""
    ready: bool = False
    scheduled_at: float | None = None
    unschedulable: str = ""
    """The scheduler's words when it found no node."""
    unpulled: str = ""
    """Reference of an image that its kubelet cannot pull; empty: none."""
    crashes: str = ""
    """How a container ends that is started again and again; empty: none does."""
    unstarted: str = ""
    """Why a container cannot be started, in its kubelet's words; empty: it can."""
    fetching: bool = False
    """Its model is being fetched."""
    deletion_at: float | None = None
    """metadata.deletionTimestamp: when its grace ends, not when it was asked to end."""
    deletion_grace_s: float = 0.0
    disruption: str = ""
    """Reason of a true DisruptionTarget condition."""
    reason: str = ""
    """status.reason: Evicted, Terminated, NodeShutdown, NodeLost, ..."""
    exits: tuple[Exit, ...] = ()
    """One per container that ended for good."""
    ended_at: float | None = None
    """When the last of these ended."""
    template_hash: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Those of polyrl.dev that are read; others are left out."""

    @property
    def ended(self) -> bool:
        """True when no container of it runs or will run again."""
        return self.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)

    @property
    def runs_since(self) -> float | None:
        """When the pod began to hold a node; None: it does not."""
        return None if self.ended else self.scheduled_at


@dataclass(frozen=True, slots=True)
class Taint:
    """One taint of a node."""

    key: str
    added_at: float | None = None


@dataclass(frozen=True, slots=True)
class ClaimFacts:
    """A Karpenter NodeClaim."""

    node: str
    """Name of the node that it became; empty: none yet."""
    deletion_at: float | None = None
    reason: str = ""
    """Reason of its disruption, when it says one."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node that runs, or ran, a pod of the job."""

    name: str
    created_at: float = 0.0
    """Later than a pod was bound to it: another machine under an old name."""
    ready: bool = True
    ready_reason: str = ""
    """Reason of the Ready condition when it is not true, with its message: where a shutdown shows."""
    ready_changed_at: float | None = None
    unschedulable: bool = False
    """Cordoned."""
    taints: tuple[Taint, ...] = ()
    deletion_at: float | None = None
    claim: ClaimFacts | None = None
    """None where Karpenter did not make it."""


@dataclass(frozen=True, slots=True)
class TrainerFacts:
    """The trainer's Job."""

    uid: str
    active: int
    """Pods that are being deleted are not among them."""
    ready: int
    failed: int
    suspended: bool
    created_at: float = 0.0
    backoff_limit: int | None = None
    terminating: int = 0
    """Pods that are being deleted and have not ended."""
    stopped: bool = False
    """Its controller has seen that it is suspended: what is counted is all that there is, and no pod comes any more."""
    complete_at: float | None = None
    failed_at: float | None = None
    failed_reason: str = ""
    failed_message: str = ""
    template_hash: str = ""
    deleting: bool = False


@dataclass(frozen=True)
class ManagerFacts:
    """The manager's newest answer."""

    status: ManagerStatus
    answered_at: float
    failed_polls: int = 0
    """Polls in a row without an answer since."""


@dataclass(frozen=True, slots=True)
class ChildFacts:
    """A child that is neither a pod nor the trainer's Job: whether it is there, and of which content."""

    kind: str
    name: str
    uid: str
    content_hash: str
    deleting: bool = False
    expires_at: float | None = None
    """When the certificate in it ends; None: it holds none, or none knows when."""


@dataclass(frozen=True)
class JobFacts:
    """All that is seen of one PolyRLJob."""

    name: str
    namespace: str
    uid: str
    generation: int
    job: PolyRLJob | None
    """None when the stored object is not one that this version understands; `refusal` says why."""
    status: JobStatus
    """As stored; empty at first."""
    refusal: str = ""
    unknown: tuple[str, ...] = ()
    """Fields of the stored object that this version does not know, and leaves out."""
    managed_by: str = ""
    deleting: bool = False
    trainer: TrainerFacts | None = None
    pods: tuple[PodFacts, ...] = ()
    """Pods of every role, oldest first; pods that are being deleted stay until they are gone."""
    nodes: Mapping[str, NodeFacts] = field(default_factory=dict)
    """By name: those that the pods name and that exist."""
    sees_nodes: bool = True
    """False where the operator may not watch nodes: then an absent one means nothing."""
    children: tuple[ChildFacts, ...] = ()
    manager: ManagerFacts | None = None
    dry_run: str | None = None
    """The API server's refusal of this generation's pods in a dry run; empty: it agreed; None: not asked yet."""

    def of_role(self, role: Role) -> tuple[PodFacts, ...]:
        """Pods of one role, oldest first."""
        return tuple(pod for pod in self.pods if pod.role is role)
