"""What is known of the cluster: trimmed objects by the job they belong to, from watches, lists and our own requests.

Whatever comes is compared by resourceVersion, so that the order of arrival does not matter: an old list cannot undo a
newer event. Objects are kept as JSON text (a fraction of what dictionaries take) and read when their job's turn
comes; every look-up is by job or by node, so that no cost grows with the number of jobs.
Refuses to hold: judgement; requests (see `resync`). Read next: `expectations`, `queue`.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl_operator.api.kinds import CLAIM, JOB, NODE, POD, TRAINER, ResourceKind
from polyrl_operator.informer.cached_object import NOWHERE, CachedObject, JobKey, held_of, job_of, place_of, version_of
from polyrl_operator.informer.expectations import Expectations

WATCHED = (POD.name, TRAINER.name)
"""Kinds of children whose end a watch tells; the others are forgotten with their job."""


Shelf = dict[tuple[str, str], CachedObject]
"""By namespace and name (jobs), or by kind and name (all others)."""


class Cache:
    """Call `observe` with whatever is seen; `wake` is told whose turn it is."""

    def __init__(self, wake: Callable[[JobKey], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._wake, self._clock = wake, clock
        self._expectations = Expectations()
        self._jobs: Shelf = {}
        self._children: defaultdict[JobKey, Shelf] = defaultdict(dict)
        self._machines: Shelf = {}
        """Nodes and NodeClaims."""
        self._pods_on: defaultdict[str, Counter[JobKey]] = defaultdict(Counter)
        """By node: how many pods it runs of each job."""
        self._claim_of: dict[str, str] = {}
        """By node: the name of its NodeClaim."""

    def observe(self, kind: ResourceKind, raw: Object, *, gone: bool = False, quiet: bool = False) -> bool:
        """Takes in an object as the API server gave it; True when that changed anything that is kept. `quiet`: whom it
        concerns knows it already."""
        metadata, now = raw["metadata"], self._clock()
        shelf, name = self._place(kind, metadata)
        held, version, place = shelf.get(name), version_of(metadata), place_of(kind, metadata)
        if (held is not None and version < held.version) or self._expectations.is_old(place, version, now):
            return False
        if gone:
            self._expectations.ended(place, metadata["uid"], version, now)
        new = None if gone else held_of(kind, raw, now)
        if held is not None and new is not None and held.text == new.text:
            held.version = new.version
            return False
        if new is None:
            shelf.pop(name, None)
        else:
            shelf[name] = new
        concerned = self._index(kind, metadata, held, new)
        if not quiet:
            for key in concerned:
                self._wake(key)
        return held is not new

    def forget_absent(self, kind: ResourceKind, namespace: str | None, seen: set[str], version: int) -> int:
        """Drops what a complete list of `version` did not show; the number of objects dropped."""
        absent = [held for held in self._of_kind(kind, namespace) if held.uid not in seen and held.version <= version]
        for held in absent:
            raw = held.read()
            raw["metadata"]["resourceVersion"] = str(version)
            self.observe(kind, raw, gone=True)
        return len(absent)

    def leaves(self, uid: str) -> None:
        """A deletion of ours was accepted; its end is owed."""
        self._expectations.leaves(uid, self._clock())

    def drop(self, kind: ResourceKind, key: JobKey, name: str, uid: str) -> None:
        """A child of the job is known to be gone, though no watch said so."""
        held = self._children[key].get((kind.name, name))
        if held is not None and held.uid == uid:
            self._expectations.ended((kind.name, key.namespace, name), uid, held.version, self._clock())
            del self._children[key][kind.name, name]
            self._count(key, held, -1)

    def all_jobs(self) -> list[JobKey]:
        """Every job."""
        return [JobKey(*name) for name in self._jobs]

    def job(self, key: JobKey) -> Object | None:
        """The job."""
        held = self._jobs.get(key)
        return None if held is None else held.read()

    def pods(self, key: JobKey, job_uid: str) -> list[Object]:
        """Pods of this job, and not of a namesake that was deleted."""
        trainer = self._children[key].get((TRAINER.name, names.trainer_name(key.name)))
        owners = {job_uid} | ({trainer.uid} if trainer is not None and trainer.owner == job_uid else set())
        return [self._seen(held) for held in self._held(key, (POD.name,)) if held.owner in owners]

    def trainer(self, key: JobKey, job_uid: str) -> Object | None:
        """The trainer's Job."""
        held = self._children[key].get((TRAINER.name, names.trainer_name(key.name)))
        return None if held is None or held.owner != job_uid else self._seen(held)

    def children(self, key: JobKey, job_uid: str) -> list[Object]:
        """All other children, metadata only."""
        fixed = (held for (kind, _), held in self._children[key].items() if kind not in WATCHED)
        return [self._seen(held) for held in fixed if held.owner == job_uid]

    def nodes_of(self, pods: Iterable[Object]) -> tuple[dict[str, Object], dict[str, Object]]:
        """Nodes of these pods, and those nodes' NodeClaims; both by the node's name, where they exist."""
        wanted = {pod["spec"].get("nodeName", "") for pod in pods}
        nodes = {name: (NODE.name, name) for name in wanted}
        claims = {name: (CLAIM.name, self._claim_of.get(name, "")) for name in wanted}
        found = [
            {name: self._machines[place].read() for name, place in places.items() if place in self._machines}
            for places in (nodes, claims)
        ]
        return found[0], found[1]

    def changed_at(self, key: JobKey, pod: str) -> float | None:
        """When the newest news came that concern a pod: its own, its node's or its node's claim's; None: not known."""
        held = self._children[key].get((POD.name, pod))
        if held is None:
            return None
        places = ((NODE.name, held.node), (CLAIM.name, self._claim_of.get(held.node, "")))
        about = [self._machines[place] for place in places if place in self._machines]
        return max(one.changed_at for one in (held, *about))

    def _place(self, kind: ResourceKind, metadata: Object) -> tuple[Shelf, tuple[str, str]]:
        name: str = metadata["name"]
        if kind is JOB:
            return self._jobs, (metadata["namespace"], name)
        if kind in (NODE, CLAIM):
            return self._machines, (kind.name, name)
        return self._children[job_of(metadata)], (kind.name, name)

    def _index(
        self, kind: ResourceKind, metadata: Object, old: CachedObject | None, new: CachedObject | None
    ) -> list[JobKey]:
        """Keeps the look-ups by node; the jobs that the change concerns."""
        if kind is JOB:
            key = JobKey(metadata["namespace"], metadata["name"])
            if new is None:
                self._forget_fixed(key)
            return [key]
        if kind in (NODE, CLAIM):
            node = metadata["name"] if kind is NODE else (new or old or NOWHERE).node
            if kind is CLAIM and node:
                self._claim_of[node] = metadata["name"]
            return list(self._pods_on.get(node, ()))
        key = job_of(metadata)
        self._count(key, old, -1)
        self._count(key, new, +1)
        return [key]

    def _count(self, key: JobKey, pod: CachedObject | None, by: int) -> None:
        if pod is not None and pod.node:
            jobs = self._pods_on[pod.node]
            jobs[key] += by
            if not jobs[key]:
                del jobs[key]
            if not jobs:
                del self._pods_on[pod.node]

    def _forget_fixed(self, key: JobKey) -> None:
        left = {place: held for place, held in self._children[key].items() if place[0] in WATCHED}
        if left:
            self._children[key] = left
        else:
            del self._children[key]

    def _held(self, key: JobKey, kinds: tuple[str, ...]) -> list[CachedObject]:
        return [held for (kind, _), held in self._children[key].items() if kind in kinds]

    def _of_kind(self, kind: ResourceKind, namespace: str | None) -> list[CachedObject]:
        if kind is JOB:
            return [held for (where, _), held in self._jobs.items() if namespace in (None, where)]
        if kind in (NODE, CLAIM):
            return [held for (what, _), held in self._machines.items() if what == kind.name]
        keys = [key for key in self._children if namespace in (None, key.namespace)]
        return [held for key in keys for held in self._held(key, (kind.name,))]

    def _seen(self, held: CachedObject) -> Object:
        """The object; one whose deletion was accepted says so, even if the watch has not told yet."""
        raw = held.read()
        if self._expectations.is_leaving(held.uid, self._clock()):
            stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            raw["metadata"].setdefault("deletionTimestamp", stamp)
        return raw
