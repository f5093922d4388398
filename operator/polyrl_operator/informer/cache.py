"""What is known of the cluster: facts of objects by the job they belong to, from watches, lists and our own requests.

Whatever comes is compared by resourceVersion, so that the order of arrival does not matter: an old list cannot undo a
newer event. Objects become facts once, when they arrive (jobs stay JSON text, a fraction of what dictionaries take);
every look-up is by job or by node, so that no cost grows with the number of jobs.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import msgspec

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.cluster.fair_queue import Urgency
from polyrl.cluster.observation.facts import ChildFacts, ClaimFacts, NodeFacts, PodFacts, TrainerFacts
from polyrl.cluster.observation.job import UNREADABLE, child_facts, claim_facts, node_facts, pod_facts, trainer_facts
from polyrl.worker import Role
from polyrl_operator.api.kinds import CLAIM, JOB, NODE, POD, TRAINER, ResourceKind

ANNOTATIONS: Final = ("polyrl.dev/", "karpenter.sh/")
"""Prefixes of the annotations of jobs that are kept; others may be 256 KiB."""

METADATA: Final = ("name", "namespace", "uid", "generation", "creationTimestamp", "deletionTimestamp", "labels")

WATCHED: Final = (POD.name, TRAINER.name)
"""Kinds of children whose end a watch reports; the others are forgotten with their job."""

DELETION_TIMEOUT_S: Final = 30.0
"""Longest lag of a watch that is taken for normal; beyond it the resync decides."""

TOMBSTONE_TTL_S: Final = 120.0
"""How long the version of an end is remembered: longer than any list takes."""


class JobKey(NamedTuple):
    """A job."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Place(NamedTuple):
    """Unique key of a live object."""

    kind: str
    namespace: str
    """Empty for objects of the whole cluster."""
    name: str


@dataclass(slots=True)
class CachedObject:
    """One object. Two are equal when nothing changed that anybody reads: heartbeats change nothing."""

    uid: str
    job: JobKey | None
    """The job itself, or the one that a child's labels name; None for nodes and NodeClaims."""
    owner: str
    """uid of its controller; empty: none."""
    node: str
    """Node of a pod or a NodeClaim, and a node's own name; empty: none yet."""
    content: Any
    """Facts of its kind (None for a pod of no role of ours); of a job its JSON text."""
    version: int = field(compare=False)
    changed_at: float = field(compare=False)
    """Monotonic: when the change came that made it so."""


_FACTS: Final[dict[ResourceKind, Callable[[Object], Any]]] = {
    POD: pod_facts,
    TRAINER: trainer_facts,
    NODE: node_facts,
    CLAIM: claim_facts,
}


def cached_object(kind: ResourceKind, raw: Object, now: float) -> CachedObject:
    """An object as the API server gave it, to be kept."""
    metadata = raw["metadata"]
    owners = (owner["uid"] for owner in metadata.get("ownerReferences") or () if owner.get("controller"))
    if kind is JOB:
        content: Any = msgspec.json.encode(_job(raw))
    else:
        content = _FACTS[kind](raw) if kind in _FACTS else child_facts(kind.name, raw)
    return CachedObject(
        uid=metadata["uid"],
        job=_job_of(kind, metadata),
        owner=next(owners, ""),
        node=_node(kind, raw),
        content=content,
        version=version_of(metadata),
        changed_at=now,
    )


def version_of(metadata: Object) -> int:
    """API servers promise that versions of one kind can be compared as numbers."""
    return int(metadata.get("resourceVersion") or 0)


def place_of(kind: ResourceKind, metadata: Object) -> Place:
    """Where the object with these metadata lies."""
    return Place(kind.name, metadata.get("namespace", ""), name=metadata["name"])


def _job_of(kind: ResourceKind, metadata: Object) -> JobKey | None:
    if kind in (NODE, CLAIM):
        return None
    name = metadata["name"] if kind is JOB else (metadata.get("labels") or {}).get(names.LABEL_JOB, "")
    return JobKey(metadata["namespace"], name)


def _node(kind: ResourceKind, raw: Object) -> str:
    if kind is NODE:
        return str(raw["metadata"]["name"])
    return str((raw.get({POD: "spec", CLAIM: "status"}.get(kind, "")) or {}).get("nodeName") or "")


def _job(raw: Object) -> Object:
    """Without resourceVersion, which by itself changes nothing, and without what may be long and is not read."""
    metadata = {key: raw["metadata"][key] for key in METADATA if key in raw["metadata"]}
    annotations = raw["metadata"].get("annotations") or {}
    ours = {key: value for key, value in annotations.items() if key.startswith(ANNOTATIONS)}
    kept: Object = {"apiVersion": JOB.api_version, "kind": JOB.name, "metadata": metadata | {"annotations": ours}}
    return kept | {part: raw[part] for part in ("spec", "status", UNREADABLE) if part in raw}


def _outlives_its_job(held: CachedObject, trainer: CachedObject | None) -> bool:
    """Whether a pod that is not of the job's `trainer` is one of a trainer's and has not ended: it was orphaned, or is
    not collected yet. Beside another Job one of nobody's may be a copy that somebody looks into."""
    pod: PodFacts = held.content
    collected = bool(held.owner) and pod.deletion_at is not None
    return pod.role is Role.TRAINER and not pod.ended and (trainer is None or collected)


def _urgency(kind: ResourceKind, old: CachedObject | None, new: CachedObject | None) -> Urgency:
    """Urgency of what is no part of a beginning: a pod ends or is to end, its node changes, the job is edited."""
    if kind is JOB:
        return Urgency.NONE if old is None else Urgency.EDIT
    if kind is not POD:
        return Urgency.LOSS if kind in (NODE, CLAIM) else Urgency.NONE
    pod: PodFacts | None = None if new is None else new.content
    ends = pod is None or pod.ended or pod.deletion_at is not None or bool(pod.disruption)
    return Urgency.LOSS if ends else Urgency.NONE


class Cache:
    """Call `observe` with whatever the API server sends; `wake` gets each job that a change concerns, `hurry` (None: as
    `wake`) each to which it is urgent."""

    def __init__(
        self,
        wake: Callable[[JobKey], None],
        clock: Callable[[], float] = time.monotonic,
        hurry: Callable[[JobKey, Urgency], None] | None = None,
    ) -> None:
        self._wake, self._clock, self._hurry = wake, clock, hurry or (lambda key, _: wake(key))
        self._expectations = Expectations()
        self._objects: dict[Place, CachedObject] = {}
        self._of_job: defaultdict[JobKey, dict[Place, CachedObject]] = defaultdict(dict)
        """Children of each job."""
        self._pods_on: defaultdict[str, Counter[JobKey]] = defaultdict(Counter)
        """By node: how many pods it runs of each job."""
        self._claim_of: dict[str, Place] = {}
        """By node: its NodeClaim."""

    def observe(self, kind: ResourceKind, raw: Object, *, deleted: bool = False, quiet: bool = False) -> bool:
        """Takes in an object as the API server gave it; True when that changed anything that is kept. `quiet`: wakes
        nobody, for whom it concerns knows it already."""
        metadata, now = raw["metadata"], self._clock()
        place, version = place_of(kind, metadata), version_of(metadata)
        old = self._objects.get(place)
        if (old is not None and version < old.version) or self._expectations.is_old(place, version, now):
            return False
        if deleted:
            self._expectations.ended(place, metadata["uid"], version, now)
        new = None if deleted else cached_object(kind, raw, now)
        if old is not None and old == new:
            old.version = version
            return False
        concerned = self._replace(place, old, new)
        if not quiet:
            urgency = _urgency(kind, old, new)
            for key in concerned:
                if urgency is Urgency.NONE:
                    self._wake(key)
                else:
                    self._hurry(key, urgency)
        return old is not new

    def forget_absent(self, kind: ResourceKind, namespace: str | None, listed: set[str], version: int) -> int:
        """Drops what a complete list of `version` did not hold, by uid; the number of objects dropped."""
        absent = [
            (place, held)
            for place, held in self._objects.items()
            if place.kind == kind.name and namespace in (None, place.namespace)
            if held.uid not in listed and held.version <= version
        ]
        for place, held in absent:
            self._expectations.ended(place, held.uid, version, self._clock())
            for key in self._replace(place, held, None):
                self._wake(key)
        return len(absent)

    def expect_deletion(self, uid: str) -> None:
        """A deletion of ours was accepted."""
        self._expectations.deletion_accepted(uid, self._clock())

    def drop(self, kind: ResourceKind, key: JobKey, name: str, uid: str) -> None:
        """A child of the job is known to be gone, though no watch reported it."""
        place = Place(kind.name, key.namespace, name=name)
        held = self._objects.get(place)
        if held is not None and held.uid == uid:
            self._expectations.ended(place, uid, held.version, self._clock())
            self._replace(place, held, None)

    def all_jobs(self) -> list[JobKey]:
        """Every job."""
        return [JobKey(place.namespace, place.name) for place in self._objects if place.kind == JOB.name]

    def job(self, key: JobKey) -> Object | None:
        """The job, with its newest resourceVersion."""
        held = self._objects.get(Place(JOB.name, key.namespace, name=key.name))
        if held is None:
            return None
        raw: Object = msgspec.json.decode(held.content)
        raw["metadata"]["resourceVersion"] = str(held.version)
        return raw

    def pods(self, key: JobKey, job_uid: str) -> list[PodFacts]:
        """Pods of this job, and not of a namesake that was deleted, but for a trainer's that may still write to their
        volume though no Job of this job's has them. One whose deletion was accepted is being deleted, even if the watch
        has not reported it yet."""
        trainer = self._trainer(key, job_uid)
        owners = {job_uid, job_uid if trainer is None else trainer.uid}
        known = (held for held in self._children(key, POD.name) if held.content is not None)
        found = [held for held in known if held.owner in owners or _outlives_its_job(held, trainer)]
        return [
            replace(held.content, deletion_at=time.time())
            if held.content.deletion_at is None and self._deletion_expected(held)
            else held.content
            for held in found
        ]

    def trainer(self, key: JobKey, job_uid: str) -> TrainerFacts | None:
        """The trainer's Job."""
        held = self._trainer(key, job_uid)
        return None if held is None else self._with_deletion(held)

    def children(self, key: JobKey, job_uid: str) -> list[ChildFacts]:
        """All other children."""
        fixed = (held for place, held in self._of_job.get(key, {}).items() if place.kind not in WATCHED)
        return [self._with_deletion(held) for held in fixed if held.owner == job_uid]

    def nodes_of(self, pods: Iterable[PodFacts]) -> tuple[dict[str, NodeFacts], list[ClaimFacts]]:
        """Nodes of these pods by name, and those nodes' NodeClaims, where they exist."""
        wanted = {pod.node for pod in pods}
        nodes = {name: self._objects.get(Place(NODE.name, "", name=name)) for name in wanted}
        claims = [self._objects.get(self._claim_of[name]) for name in wanted if name in self._claim_of]
        return {name: node.content for name, node in nodes.items() if node}, [one.content for one in claims if one]

    def changed_at(self, key: JobKey, pod: str) -> float | None:
        """When the newest change came that concerns a pod: its own, its node's or its node's claim's; None: unknown."""
        held = self._objects.get(Place(POD.name, key.namespace, name=pod))
        if held is None or held.job != key:
            return None
        node, claim = Place(NODE.name, "", name=held.node), self._claim_of.get(held.node)
        about = [self._objects[place] for place in (node, claim) if place is not None and place in self._objects]
        return max(one.changed_at for one in (held, *about))

    def _replace(self, place: Place, old: CachedObject | None, new: CachedObject | None) -> list[JobKey]:
        """Puts `new` in the place of `old`, in all look-ups; the jobs that the change concerns."""
        if new is None:
            self._objects.pop(place, None)
        else:
            self._objects[place] = new
        if place.kind == JOB.name:
            if new is None:
                self._forget_fixed(JobKey(place.namespace, place.name))
            return [JobKey(place.namespace, place.name)]
        if place.kind in (NODE.name, CLAIM.name):
            node = (new or old or _ABSENT).node
            if place.kind == CLAIM.name and node:
                self._claim_of[node] = place
            return list(self._pods_on.get(node, ()))
        if old is not None and old.job is not None:
            self._of_job[old.job].pop(place, None)
            if not self._of_job[old.job]:
                del self._of_job[old.job]
        if new is not None and new.job is not None:
            self._of_job[new.job][place] = new
        self._count(old, -1)
        self._count(new, +1)
        return list(dict.fromkeys(held.job for held in (old, new) if held is not None and held.job is not None))

    def _count(self, pod: CachedObject | None, by: int) -> None:
        if pod is None or pod.job is None or not pod.node:
            return
        jobs = self._pods_on[pod.node]
        jobs[pod.job] += by
        if not jobs[pod.job]:
            del jobs[pod.job]
        if not jobs:
            del self._pods_on[pod.node]

    def _forget_fixed(self, key: JobKey) -> None:
        for place in [place for place in self._of_job.get(key, ()) if place.kind not in WATCHED]:
            self._replace(place, self._objects[place], None)

    def _children(self, key: JobKey, kind: str) -> Iterator[CachedObject]:
        return (held for place, held in self._of_job.get(key, {}).items() if place.kind == kind)

    def _trainer(self, key: JobKey, job_uid: str) -> CachedObject | None:
        held = self._objects.get(Place(TRAINER.name, key.namespace, name=names.trainer_name(key.name)))
        return None if held is None or held.owner != job_uid else held

    def _deletion_expected(self, held: CachedObject) -> bool:
        return self._expectations.is_pending(held.uid, self._clock())

    def _with_deletion(self, held: CachedObject) -> Any:
        return replace(held.content, deleting=True) if self._deletion_expected(held) else held.content


class Expectations:
    """What the watch has not shown yet, or shows too late: our deletions, and objects older than a seen end.

    A watch lags behind our own requests, and a list may be older than the watch. Creations need no expectation: the
    reply of a POST goes into the cache at once, and what is newer there is never replaced by what is older. A deletion
    leaves no object to compare with; so its uid is remembered until its end is seen, or until a timeout: then the cache
    is believed again, because a forgotten expectation must not blind us for ever. Times are of one monotonic clock.
    """

    def __init__(self) -> None:
        self._deletions: dict[str, float] = {}
        self._tombstones: dict[Place, tuple[float, int]] = {}

    def deletion_accepted(self, uid: str, now: float) -> None:
        """The deletion of the object with this uid was accepted."""
        self._deletions.pop(uid, None)
        self._deletions[uid] = now + DELETION_TIMEOUT_S
        while self._deletions[oldest := next(iter(self._deletions))] <= now:
            del self._deletions[oldest]

    def is_pending(self, uid: str, now: float) -> bool:
        """True while an accepted deletion has not been seen to end."""
        return self._deletions.get(uid, now) > now

    def ended(self, place: Place, uid: str, version: int, now: float) -> None:
        """What had this name was gone by `version`."""
        self._deletions.pop(uid, None)
        newest = max(version, self._tombstones.pop(place, (0.0, 0))[1])
        self._tombstones[place] = (now + TOMBSTONE_TTL_S, newest)
        # The oldest come first: thousands of ends within the time cost no look at all of them for each.
        while self._tombstones[oldest := next(iter(self._tombstones))][0] <= now:
            del self._tombstones[oldest]

    def is_old(self, place: Place, version: int, now: float) -> bool:
        """True when whatever had this name at `version` is known to be gone."""
        until, ended = self._tombstones.get(place, (now, 0))
        return until > now and version <= ended


_ABSENT: Final = CachedObject(uid="", job=None, owner="", node="", content=None, version=0, changed_at=0.0)
