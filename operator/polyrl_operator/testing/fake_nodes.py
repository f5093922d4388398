"""A stand-in for kubelets, Job controller and garbage collector on a bare API server, for tests and benchmarks.

It plays what the operator sees of them: pods start and become ready, end when they are deleted, a Job has its pod,
children go with their owner. It has no containers, no scheduling, and none of the operator's own rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.worker import Role
from polyrl_operator.api.client import ApiError, Client, follow
from polyrl_operator.api.kinds import FIXED, JOB, POD, SECRET, TRAINER, ResourceKind
from polyrl_operator.informer.resync import CHILDREN

SIDE_BY_SIDE: Final = 32
"""Requests at a time."""


class FakeNodes:
    """Run `play` as a task. `session` reaches the API server at `host`. `address` is every pod's IP; `node` is the one
    that pods are bound to (without one they are not, and the API server deletes them without grace)."""

    def __init__(
        self, client: Client, session: aiohttp.ClientSession, host: str, *, address: str = "127.0.0.1", node: str = ""
    ) -> None:
        self._client, self._session, self._host = client, session, host
        self._address, self._node = address, node
        self._slots = asyncio.Semaphore(SIDE_BY_SIDE)
        self._tasks: set[asyncio.Task[None]] = set()
        self.held: set[str] = set()
        """Names of pods that stay as they are: no node is found for them, or their node is silent."""

    async def play(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for kind, seen in (
                    (POD, self._pod),
                    (SECRET, self._secret),
                    (TRAINER, self._trainer),
                    (JOB, self._job),
                ):
                    group.create_task(self._follow(kind, seen))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def finish_trainer(self, namespace: str, job: str) -> None:
        """The trainer ends well: its pod has succeeded, and its Job is complete."""
        timestamp = _now()
        kinds = ("SuccessCriteriaMet", "Complete")
        ended = [{"type": kind, "status": "True", "lastTransitionTime": timestamp} for kind in kinds]
        pods = [pod async for pod in self._pods_of(namespace, names.trainer_name(job))]
        for pod in pods:
            done: Object = {"phase": "Succeeded", "conditions": []}
            await self._status(POD, namespace, pod["metadata"]["name"], done)
        status = {"active": 0, "ready": 0, "succeeded": 1, "completedIndexes": "0", "completionTime": timestamp}
        await self._status(TRAINER, namespace, names.trainer_name(job), status | {"conditions": ended})

    async def _follow(self, kind: ResourceKind, seen: Callable[[str, Object], Any]) -> None:
        selector = "" if kind is JOB else CHILDREN
        async for change, items in follow(self._client, self._session, kind, None, selector):
            for item in items:
                self._spawn(seen(change, item))

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(self._safely(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _safely(self, work: Any) -> None:
        async with self._slots:
            # Whatever was changed meanwhile comes as another event.
            with suppress(ApiError):
                await work

    async def _pod(self, event: str, pod: Object) -> None:
        metadata, status = pod["metadata"], pod.get("status") or {}
        if event == "DELETED":
            await self._count_again(metadata)
        if event == "DELETED" or metadata["name"] in self.held:
            return
        if metadata.get("deletionTimestamp"):
            await self._client.delete(POD, metadata["namespace"], metadata["name"], metadata["uid"], 0)
        elif self._node and not pod["spec"].get("nodeName"):
            await self._bind(metadata)
        elif status.get("phase") == "Pending" and not status.get("podIP") and await self._can_mount(pod):
            await self._status(POD, metadata["namespace"], metadata["name"], self._running(metadata), seen=metadata)

    async def _can_mount(self, pod: Object) -> bool:
        """A kubelet starts no container before the Secrets that its pod mounts are there; a rollout's own is last."""
        metadata = pod["metadata"]
        if metadata["labels"].get(names.LABEL_ROLE) != Role.ROLLOUT.value:
            return True
        return await self._client.get(SECRET, metadata["namespace"], metadata["name"]) is not None

    async def _secret(self, event: str, secret: Object) -> None:
        metadata = secret["metadata"]
        if event != "DELETED" and metadata["labels"].get(names.LABEL_ROLE) == Role.ROLLOUT.value:
            pod = await self._client.get(POD, metadata["namespace"], metadata["name"])
            if pod is not None:
                await self._pod("MODIFIED", pod)

    async def end(self, pod: Object) -> None:
        """A pod that is being deleted has ended, though it was held."""
        metadata = pod["metadata"]
        self.held.discard(metadata["name"])
        await self._client.delete(POD, metadata["namespace"], metadata["name"], metadata["uid"], 0)

    async def _count_again(self, pod: Object) -> None:
        """The Job controller sees that a pod of its has ended."""
        name = pod["labels"].get("batch.kubernetes.io/job-name")
        job = await self._client.get(TRAINER, pod["namespace"], name) if name else None
        if job is not None:
            await self._trainer("MODIFIED", job)

    async def _bind(self, metadata: Object) -> None:
        target = {"apiVersion": "v1", "kind": "Node", "name": self._node}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": metadata["name"]}, "target": target}
        path = POD.path(metadata["namespace"], metadata["name"], "binding")
        async with self._session.post(self._host + path, json=binding) as response:
            await response.read()

    def _running(self, metadata: Object) -> Object:
        """A manager without a container behind it never answers, so it never becomes ready."""
        timestamp, role = _now(), metadata["labels"].get(names.LABEL_ROLE)
        ready = () if role == Role.MANAGER.value else ("ContainersReady", "Ready")
        true = [
            {"type": kind, "status": "True", "lastTransitionTime": timestamp}
            for kind in ("PodScheduled", "Initialized", *ready)
        ]
        place = {"podIP": self._address, "podIPs": [{"ip": self._address}], "startTime": timestamp}
        return {"phase": "Running", "conditions": true} | place

    async def _trainer(self, event: str, job: Object) -> None:
        metadata, status = job["metadata"], job.get("status") or {}
        failed = any((one["type"], one["status"]) == ("Failed", "True") for one in status.get("conditions") or ())
        if event == "DELETED" or status.get("completionTime") or failed:
            return
        there = self._pods_of(metadata["namespace"], metadata["name"])
        pods = [pod async for pod in there if pod["metadata"]["ownerReferences"][0]["uid"] == metadata["uid"]]
        counts: Object
        if job["spec"].get("suspend"):
            for pod in pods:
                if not pod["metadata"].get("deletionTimestamp"):
                    await self._client.delete(
                        POD, metadata["namespace"], pod["metadata"]["name"], pod["metadata"]["uid"]
                    )
            counts = {"active": 0, "ready": 0, "terminating": len(pods)}
        elif not _in_the_way(job, pods):
            with suppress(ApiError):
                await self._client.create(_trainer_pod(job, len(pods)))
            counts = {"active": 1, "ready": 1, "terminating": 0, "startTime": status.get("startTime") or _now()}
        else:
            counts = {}
        now = counts | _suspended("True" if job["spec"].get("suspend") else "False", status)
        if any(status.get(key, 0) != value for key, value in now.items()):
            await self._status(TRAINER, metadata["namespace"], metadata["name"], now, seen=metadata)

    async def _job(self, event: str, job: Object) -> None:
        """Garbage collection of a job's children."""
        if event != "DELETED":
            return
        namespace, uid = job["metadata"]["namespace"], job["metadata"]["uid"]
        for kind in (*FIXED, SECRET, TRAINER, POD):
            async for items, _ in self._client.pages(kind, namespace, f"{names.LABEL_JOB}={job['metadata']['name']}"):
                for item in items:
                    owners = {owner["uid"] for owner in item["metadata"].get("ownerReferences") or ()}
                    if uid in owners or kind in (POD, SECRET):
                        name = item["metadata"]["name"]
                        await self._client.delete(kind, namespace, name, item["metadata"]["uid"], 0)

    async def _pods_of(self, namespace: str, trainer: str) -> AsyncIterator[Object]:
        async for items, _ in self._client.pages(POD, namespace, f"batch.kubernetes.io/job-name={trainer}"):
            for item in items:
                yield item

    async def _status(
        self, kind: ResourceKind, namespace: str, name: str, status: Object, *, seen: Object | None = None
    ) -> None:
        """Only if it still is as it was `seen`: a late start must not undo an end."""
        version = {} if seen is None else {"metadata": {"resourceVersion": seen["resourceVersion"]}}
        await self._client.patch(kind, namespace, name, version | {"status": status}, "status")


def _trainer_pod(job: Object, beside: int) -> Object:
    """`beside`: so many of its pods are there, which makes the name: two events at once make one pod."""
    template, name = job["spec"]["template"], job["metadata"]["name"]
    metadata = template.get("metadata") or {}
    own = {"batch.kubernetes.io/job-name": name, "batch.kubernetes.io/job-completion-index": "0"}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"], "controller": True}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{name}-0-{job['metadata']['uid'][:5]}-{beside}",
            "namespace": job["metadata"]["namespace"],
            "labels": (metadata.get("labels") or {}) | own,
            "annotations": metadata.get("annotations") or {},
            "ownerReferences": [owner],
        },
        "spec": template["spec"],
    }


def _in_the_way(job: Object, pods: Sequence[Object]) -> list[Object]:
    """Pods beside which no other is made: with podReplacementPolicy Failed also those that are being deleted."""
    waits = job["spec"].get("podReplacementPolicy") == "Failed"
    return [pod for pod in pods if waits or not pod["metadata"].get("deletionTimestamp")]


def _suspended(holds: str, status: Object) -> Object:
    """The conditions of a Job whose controller has seen whether it is suspended; none before it first was."""
    before = {one["type"]: one["status"] for one in status.get("conditions") or ()}
    if before.get("Suspended", "False") == holds:
        return {}
    return {"conditions": [{"type": "Suspended", "status": holds, "lastTransitionTime": _now()}]}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
