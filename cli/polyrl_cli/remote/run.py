"""`polyrl run --on kubernetes FILE`: apply a manifest with the files beside it, then tell its story to the end.

    checked manifest -> ConfigMap of its code (where it names one) -> server-side apply -> events and status as lines

The same objects as `kubectl apply -k`; stopping to watch changes nothing in the cluster.
Refuses to hold: what runs where (the operator's), the local run (see `run`). Read next: `cluster_status`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from polyrl.cluster.actions import Object
from polyrl.errors import RunFailed, UserError
from polyrl.manifest.job import PolyRLJob
from polyrl_cli.manifests.load import check_files, job_of, read_manifest
from polyrl_cli.remote.cluster import GONE, ClusterOptions, UserCluster, user_cluster
from polyrl_cli.remote.code_config_map import code_config_map
from polyrl_cli.remote.status import condition, ended, headline, story
from polyrl_cli.report.progress import PLAIN_EVERY_S, clock_text
from polyrl_operator.api.client import ApiError
from polyrl_operator.api.kinds import EVENT, JOB

NOBODY_S: Final = 20.0
"""After which a job without any status is worth a word: an operator needs a second."""

Emit = Callable[[str], None]


def run_on_kubernetes(file: Path, sets: list[str], where: ClusterOptions, emit: Emit) -> int:
    """Applies the manifest and follows it. Returns the exit code: 0 complete, 1 failed.

    Raises UserError when the manifest or the cluster refuses; KeyboardInterrupt leaves the job as it is.
    """
    source = read_manifest(file, sets)
    job = job_of(source)
    check_files(job, file, sets, absolute=False)
    return asyncio.run(_run(source.data, job, file, where, emit))


def detached() -> str:
    """The word to whoever stops watching."""
    return "stopped watching; the job goes on (polyrl status JOB tells how, kubectl delete prl JOB ends it)"


@dataclass
class Telling:
    """What was told of a job already: pure, so that it can be tested without a cluster."""

    began: float
    """Monotonic."""
    quiet: bool = False
    """Whether events that are there at first are old ones."""
    told_events: set[tuple[str, int]] = field(default_factory=set)
    told_line: str = ""
    told_at: float = float("-inf")

    def events(self, change: str, events: list[Object], now: float) -> list[str]:
        """Lines for events that were not told yet."""
        lines = []
        for event in events:
            mark = (event["metadata"]["uid"], (event.get("series") or {}).get("count", 1))
            if change == GONE or mark in self.told_events:
                continue
            self.told_events.add(mark)
            if not (self.quiet and change == "LIST"):
                lines.append(f"{self._clock(now)}  {_event(event)}")
        self.quiet = False
        return lines

    def job(self, raw: Object, now: float) -> list[str]:
        """A line when the job's story has changed, every few seconds at most."""
        line = headline(raw)
        if not raw.get("status") or line == self.told_line or now - self.told_at < PLAIN_EVERY_S:
            return []
        self.told_line, self.told_at = line, now
        return [f"{self._clock(now)}  {line}"]

    def _clock(self, now: float) -> str:
        return clock_text(now - self.began)


def _event(event: Object) -> str:
    count = (event.get("series") or {}).get("count", 1)
    times = f" ({count} times)" if count > 1 else ""
    return f"{event.get('reason', '')}: {event.get('note', '')}{times}"


async def _run(data: dict[str, Any], job: PolyRLJob, file: Path, where: ClusterOptions, emit: Emit) -> int:
    name = job.metadata.name
    async with user_cluster(where, job.metadata.namespace) as cluster:
        before = await cluster.client.get(JOB, cluster.namespace, name)
        stored = await _apply(cluster, data, job, file)
        verb = "made" if before is None else "applied again"
        emit(f"{name} is {verb} in namespace {cluster.namespace}; Ctrl-C stops watching, not the job")
        if (condition_ := ended(stored)) and before is not None:
            raise UserError(
                f"{name} is {condition_['type']} already; delete it (kubectl delete prl {name}) or give --name"
            )
        return await _follow(cluster, stored, Telling(time.monotonic(), quiet=before is not None), emit)


async def _apply(cluster: UserCluster, data: dict[str, Any], job: PolyRLJob, file: Path) -> Object:
    files = code_config_map(job, file, cluster.namespace)
    if files is not None:
        await cluster.client.apply(files)
    metadata = {**data["metadata"], "namespace": cluster.namespace}
    try:
        return await cluster.client.apply({**data, "metadata": metadata})
    except ApiError as error:
        if error.status == 404:
            await cluster.require_crd()
        raise


async def _follow(cluster: UserCluster, stored: Object, telling: Telling, emit: Emit) -> int:
    name, uid = stored["metadata"]["name"], stored["metadata"]["uid"]
    news: asyncio.Queue[tuple[str, str, list[Object]] | BaseException] = asyncio.Queue()
    watches = [
        asyncio.create_task(_feed(news, "job", cluster.changes(JOB, {"fieldSelector": f"metadata.name={name}"}))),
        asyncio.create_task(_feed(news, "event", cluster.changes(EVENT, {"fieldSelector": f"regarding.uid={uid}"}))),
    ]
    last = stored
    try:
        while True:
            what, change, objects = await _next(news, emit, last, telling)
            now = time.monotonic()
            if what == "event":
                lines = telling.events(change, objects, now)
            else:
                last = _newest(uid, name, change, objects)
                lines = telling.job(last, now)
            for line in lines:
                emit(line)
            if what == "job" and (code := _outcome(last, emit)) is not None:
                return code
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


async def _next(
    news: asyncio.Queue[tuple[str, str, list[Object]] | BaseException], emit: Emit, last: Object, telling: Telling
) -> tuple[str, str, list[Object]]:
    """The next piece of news; says once when nobody looks after the job."""
    while True:
        try:
            item = await asyncio.wait_for(news.get(), NOBODY_S)
        except TimeoutError:
            if not last.get("status") and not telling.told_line:
                telling.told_line = "nobody"
                emit(f"no operator has looked at the job for {NOBODY_S:.0f} s: is the chart installed, and here?")
            continue
        if isinstance(item, BaseException):
            raise item
        return item


async def _feed(
    news: asyncio.Queue[tuple[str, str, list[Object]] | BaseException],
    what: str,
    changes: AsyncIterator[tuple[str, list[Object]]],
) -> None:
    try:
        async for change, objects in changes:
            news.put_nowait((what, change, objects))
    except ApiError as error:
        news.put_nowait(error)


def _newest(uid: str, name: str, change: str, objects: list[Object]) -> Object:
    if change == GONE or not objects or objects[0]["metadata"]["uid"] != uid:
        raise RunFailed(f"{name} was deleted")
    return objects[0]


def _outcome(raw: Object, emit: Emit) -> int | None:
    """Exit code of a job that is over; None while it is not. Raises UserError when it cannot run as written."""
    accepted = condition(raw, "Accepted")
    if accepted.get("status") == "False" and accepted.get("observedGeneration") == raw["metadata"]["generation"]:
        raise UserError(f"{raw['metadata']['name']} is not accepted: {accepted.get('message', '')}")
    end = ended(raw)
    if not end:
        return None
    for line in story(raw):
        emit(line)
    return 0 if end["type"] == "Complete" else 1
