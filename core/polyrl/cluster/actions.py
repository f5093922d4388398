"""What is to be done about a job, as values that print as sentences. Repeating any of them is harmless."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from polyrl.cluster.reasons import EventReason
from polyrl.cluster.state import ReconcileState as ReconcileState
from polyrl.manifest.status import JobStatus

Object: TypeAlias = dict[str, Any]
"""A Kubernetes object as plain values, with apiVersion, kind and metadata.name."""


@dataclass(frozen=True)
class MakeKeys:
    """Make the job's keys: the Secret of them all (CURVE pairs, token, the manager's certificate), drawn once, and from
    what is stored a copy of each role's files in a Secret of its own."""

    name: str
    hosts: tuple[str, ...]
    """DNS names that the manager's certificate is for."""
    now: float
    """When it begins, in Unix seconds."""

    def __str__(self) -> str:
        return f"make Secret {self.name}, and of it one for each role"


@dataclass(frozen=True)
class RenewCertificate:
    """Put a fresh certificate into the manager's Secret; the manager notices its file."""

    name: str
    uid: str
    root: str
    """Secret with the authority and its key."""
    hosts: tuple[str, ...]
    now: float
    """When it begins, in Unix seconds."""

    def __str__(self) -> str:
        return f"renew the certificate in Secret {self.name}: half its life is over"


@dataclass(frozen=True)
class MakeEngineKeys:
    """Make the Secret of each of these pods, by which its agent speaks for the engine of that name and for no other. It
    goes with its pod."""

    root: str
    """Secret that they come from."""
    pods: tuple[tuple[str, str], ...]
    """Name and uid."""

    def __str__(self) -> str:
        return f"make keys of {', '.join(name for name, _ in self.pods)}"


@dataclass(frozen=True)
class _Write:
    object: Object
    why: str

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()} {self.object['kind']} {self.object['metadata']['name']}: {self.why}"


class Create(_Write):
    """Make an object that is not there; one that is there already is left as it is."""


class Apply(_Write):
    """Make an object be as described, by server-side apply."""


@dataclass(frozen=True)
class Delete:
    """Delete an object, if it is still the one with this uid."""

    kind: str
    name: str
    uid: str
    why: str
    grace_s: int | None = None
    """None: as the object says; 0: at once, for a node that will never answer."""

    def __str__(self) -> str:
        grace = "" if self.grace_s is None else f" within {self.grace_s} s"
        return f"delete {self.kind} {self.name}{grace}: {self.why}"


@dataclass(frozen=True)
class DrainEngine:
    """Ask the manager to drain a pod's engine, which ends within `deadline_s`."""

    pod: str
    uid: str
    deadline_s: float
    why: str
    ended: bool = False
    """The pod is gone: the manager is to refuse its engine's name from now on."""

    def __str__(self) -> str:
        return f"drain {self.pod} within {self.deadline_s:.1f} s: {self.why}"


@dataclass(frozen=True)
class Annotate:
    """Write annotations on a pod of ours, if it is still the one with this uid."""

    pod: str
    uid: str
    annotations: Mapping[str, str]
    why: str

    def __str__(self) -> str:
        return f"annotate {self.pod}: {self.why}"


@dataclass(frozen=True)
class SuspendTrainer:
    """Set the trainer Job's `suspend`."""

    name: str
    suspend: bool
    why: str

    @property
    def spec(self) -> Object:
        return {"suspend": self.suspend}

    def __str__(self) -> str:
        return f"{'suspend' if self.suspend else 'resume'} Job {self.name}: {self.why}"


@dataclass(frozen=True)
class LimitRestarts:
    """Set the trainer Job's `backoffLimit`."""

    name: str
    limit: int

    @property
    def spec(self) -> Object:
        return {"backoffLimit": self.limit}

    def __str__(self) -> str:
        return f"let Job {self.name} start its pods again {self.limit} times"


@dataclass(frozen=True)
class FindTrainer:
    """Read the trainer's Job by its name, and give it back the label by which watches know it, should it lack that."""

    name: str

    def __str__(self) -> str:
        return f"look for Job {self.name}: its pods are there, and no watch shows it"


@dataclass(frozen=True)
class DryRun:
    """Ask the API server whether it would take these pods; the answer comes back as `JobFacts.dry_run`."""

    objects: tuple[Object, ...]
    generation: int

    def __str__(self) -> str:
        return f"ask for a dry run of generation {self.generation}"


@dataclass(frozen=True)
class RecordEvent:
    """An Event on the job."""

    reason: EventReason
    message: str
    """One sentence."""
    type: Literal["Normal", "Warning"] = "Normal"

    def __str__(self) -> str:
        return f"say {self.reason}: {self.message}"


Action: TypeAlias = (
    MakeKeys
    | MakeEngineKeys
    | RenewCertificate
    | Create
    | Apply
    | Delete
    | DrainEngine
    | Annotate
    | SuspendTrainer
    | LimitRestarts
    | FindTrainer
    | DryRun
    | RecordEvent
)


@dataclass(frozen=True)
class ReconcileResult:
    """What one reconcile decides."""

    actions: tuple[Action, ...]
    """In order."""
    status: JobStatus
    """To be written when it differs from the stored one."""
    state: ReconcileState = field(default_factory=ReconcileState)
    wake_at: float | None = None
    """Unix seconds at which to reconcile again even if nothing happens; None: only on events."""
