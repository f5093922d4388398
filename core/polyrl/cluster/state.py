"""What one reconcile hands to the next, and may be lost: an operator that starts anew begins with an empty one.

Nothing that must be exact lives here. What must survive is in the status, in pods' annotations and in their names;
without a memory, silence is timed anew, and refused requests are tried at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from polyrl.sample import Pool
from polyrl.worker import Role


@dataclass(frozen=True)
class LastSeenPod:
    """A pod at the last reconcile, should it vanish without a signal."""

    name: str
    role: Role
    pool: Pool | None
    node: str
    settled: bool
    """Nothing more is to be learnt from its end: it was counted or released, had ended, or had no node yet."""
    runs_since: float | None
    """When it got its node; None: it had none, or had ended."""
    loss_number: str = ""
    """The number that it was given, in that reconcile or before; it keeps it when it has vanished."""


@dataclass(frozen=True)
class DesiredHashes:
    """Hashes of what this generation of the job asks for, so that it is built again only when the job changed."""

    generation: int
    templates: Mapping[Role, str]
    fixed: Mapping[tuple[str, str], str]
    """Content of the fixed children, by kind and name."""


@dataclass(frozen=True)
class Refusal:
    """The API server took none of our new pods, at `at` (Unix seconds) and `times` times in a row."""

    message: str
    at: float
    times: int = 1
    of_pods: bool = True
    """False: it was of something that pods cannot do without, and none was asked for."""


@dataclass(frozen=True)
class ReconcileState:
    """What one job's reconciles remember. The operator adds what its requests showed: see the `with_` methods."""

    began_at: float | None = None
    """When the first of these reconciles was; an absent engine counts only after a while."""
    last_seen: Mapping[str, LastSeenPod] = field(default_factory=dict)
    """Pods of the last reconcile by uid."""
    nodes: frozenset[str] = frozenset()
    """Nodes of these pods that were there."""
    absent_since: Mapping[str, float] = field(default_factory=dict)
    """By name of a node that a pod is bound to: since when it has been absent."""
    silent_since: Mapping[str, float] = field(default_factory=dict)
    """By uid of a pod that was registered: since when the manager has not listed its engine."""
    registered: frozenset[str] = frozenset()
    """UIDs of pods whose engine the manager has listed."""
    drains_confirmed: frozenset[str] = frozenset()
    """UIDs of pods whose drain the manager has confirmed."""
    keys_made: frozenset[str] = frozenset()
    """UIDs of rollout pods whose own Secret was made, or was there."""
    renewal_tried_at: float | None = None
    """When a renewal of the manager's certificate was last decided."""
    hashes: DesiredHashes | None = None
    accepted: str = ""
    """Hash of the pods that the API server agreed to in a dry run."""
    dry_run_at: float | None = None
    """When the dry run that was refused was asked for."""
    refusal: Refusal | None = None
    """The last refusal: a quota, a webhook, Pod Security."""

    def with_drain_confirmed(self, uid: str) -> ReconcileState:
        """This state after the manager confirmed the drain of a pod."""
        return replace(self, drains_confirmed=self.drains_confirmed | {uid})

    def with_released(self, uids: Collection[str]) -> ReconcileState:
        """This state once we are about to delete these pods, whose end is no loss even if we never hear the answer."""
        seen = {uid: replace(pod, settled=pod.settled or uid in uids) for uid, pod in self.last_seen.items()}
        return replace(self, last_seen=seen)

    def with_refusal(self, message: str, now: float, *, of_pods: bool = True) -> ReconcileState:
        """This state after the API server refused a creation."""
        times = 1 if self.refusal is None else self.refusal.times + (now > self.refusal.at)
        # It may have been one of those Secrets; to make one again is harmless.
        return replace(self, refusal=Refusal(message, now, times=times, of_pods=of_pods), keys_made=frozenset())

    def without_refusal(self) -> ReconcileState:
        """This state after the API server accepted a creation."""
        return replace(self, refusal=None)
