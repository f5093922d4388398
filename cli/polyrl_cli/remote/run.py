"""`polyrl run --on kubernetes FILE`: apply a manifest with the files beside it, then print what happens to the end.

    checked manifest -> ConfigMap of its code (where it names one) -> server-side apply -> events and status as lines

The same objects as `kubectl apply -k`; stopping to watch changes nothing in the cluster.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from polyrl.cluster.actions import Object
from polyrl.errors import RunFailed, UserError
from polyrl.history.losses import clock_text
from polyrl.manifest.job import PolyRLJob
from polyrl.manifest.rules.template_gpus import template_notes
from polyrl_cli.manifests.file_checks import named_files
from polyrl_cli.manifests.load import check_files, job_of, read_manifest
from polyrl_cli.manifests.yaml_source import path_text
from polyrl_cli.remote.cluster import GONE, ClusterOptions, UserCluster, user_cluster
from polyrl_cli.remote.status import ended, find_condition, headline, status_report
from polyrl_cli.report.progress import PLAIN_EVERY_S
from polyrl_operator.api.client import ApiError
from polyrl_operator.api.kinds import EVENT, JOB
from polyrl_trainer.data.hub import is_fetched

NO_OPERATOR_S: Final = 20.0
"""After which a job without any status is worth a line: an operator needs a second."""

DETACHED: Final = "stopped watching; the job goes on (polyrl status JOB tells how, kubectl delete prl JOB ends it)"
"""Printed to whoever stops watching."""

Emit = Callable[[str], None]
Change = tuple[str, str, list[Object]]
"""`job` or `event`, type of the change, objects."""

MAX_BYTES: Final = 1 << 20
"""What the API server takes of data in one ConfigMap."""

MODEL_PATH: Final = ("spec", "recipe", "model", "path")

_KEY: Final = re.compile(r"[-._a-zA-Z0-9]{1,253}")


def run_on_kubernetes(file: Path, sets: list[str], options: ClusterOptions, emit: Emit) -> int:
    """Applies the manifest and follows it. Returns the exit code: 0 complete, 1 failed.

    Raises UserError when the manifest or the cluster refuses; KeyboardInterrupt leaves the job as it is.
    """
    source = read_manifest(file, sets)
    job = job_of(source)
    check_files(job, file, sets, absolute=False)
    return asyncio.run(_run(source.data, job, file, options, emit))


@dataclass
class JobLines:
    """Lines on what happens to a job, each once."""

    began: float
    """Monotonic."""
    quiet: bool = False
    """Whether events that are there at first are old ones."""
    printed_events: set[tuple[str, int]] = field(default_factory=set)
    printed_line: str = ""
    printed_at: float = float("-inf")

    def events(self, change: str, events: list[Object], now: float) -> list[str]:
        """Lines for events that were not printed yet, or that were counted up since."""
        lines = []
        for event in events:
            count = (event.get("series") or {}).get("count", 1)
            key = (event["metadata"]["uid"], count)
            if change == GONE or key in self.printed_events:
                continue
            self.printed_events.add(key)
            if not (self.quiet and change == "LIST"):
                times = f" ({count} times)" if count > 1 else ""
                lines.append(self._line(now, f"{event.get('reason', '')}: {event.get('note', '')}{times}"))
        self.quiet = False
        return lines

    def job(self, raw: Object, now: float) -> list[str]:
        """A line when the job's headline has changed, every few seconds at most."""
        line = headline(raw)
        if not raw.get("status") or line == self.printed_line or now - self.printed_at < PLAIN_EVERY_S:
            return []
        self.printed_line, self.printed_at = line, now
        return [self._line(now, line)]

    def _line(self, now: float, text: str) -> str:
        return f"{clock_text(now - self.began)}  {text}"


async def _run(data: dict[str, Any], job: PolyRLJob, file: Path, options: ClusterOptions, emit: Emit) -> int:
    name = job.metadata.name
    async with user_cluster(options, job.metadata.namespace) as cluster:
        before = await cluster.client.get(JOB, cluster.namespace, name)
        stored = await _apply(cluster, data, job, file)
        verb = "made" if before is None else "applied again"
        emit(f"{name} is {verb} in namespace {cluster.namespace}; Ctrl-C stops watching, not the job")
        for note in template_notes(job.spec):
            emit(f"note: {note}")
        if (end := ended(stored)) and before is not None:
            raise UserError(f"{name} is {end['type']} already; delete it (kubectl delete prl {name}) or give --name")
        return await _follow(cluster, stored, JobLines(time.monotonic(), quiet=before is not None), emit)


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


async def _follow(cluster: UserCluster, stored: Object, lines: JobLines, emit: Emit) -> int:
    name, uid = stored["metadata"]["name"], stored["metadata"]["uid"]
    changes: asyncio.Queue[Change | ApiError] = asyncio.Queue()
    of_job = cluster.changes(JOB, field_selector=f"metadata.name={name}")
    of_events = cluster.changes(EVENT, field_selector=f"regarding.uid={uid}")
    watches = [
        asyncio.create_task(_watch(changes, "job", of_job)),
        asyncio.create_task(_watch(changes, "event", of_events)),
    ]
    last = stored
    try:
        while True:
            what, change, objects = await _next(changes, emit, last, lines)
            now = time.monotonic()
            if what == "job" and (change == GONE or not objects or objects[0]["metadata"]["uid"] != uid):
                raise RunFailed(f"{name} was deleted")
            last = objects[0] if what == "job" else last
            for line in lines.job(last, now) if what == "job" else lines.events(change, objects, now):
                emit(line)
            if what == "job" and (code := _exit_code(last, emit)) is not None:
                return code
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


async def _next(changes: asyncio.Queue[Change | ApiError], emit: Emit, last: Object, lines: JobLines) -> Change:
    """The next change; prints once when no operator looks after the job."""
    while True:
        try:
            change = await asyncio.wait_for(changes.get(), NO_OPERATOR_S)
        except TimeoutError:
            if not last.get("status") and not lines.printed_line:
                lines.printed_line = "no operator"
                emit(f"no operator has handled the job for {NO_OPERATOR_S:.0f} s: is the chart installed, and here?")
            continue
        if isinstance(change, ApiError):
            raise change
        return change


async def _watch(
    changes: asyncio.Queue[Change | ApiError], what: str, watched: AsyncIterator[tuple[str, list[Object]]]
) -> None:
    try:
        async for change, objects in watched:
            changes.put_nowait((what, change, objects))
    except ApiError as error:
        changes.put_nowait(error)


def _exit_code(raw: Object, emit: Emit) -> int | None:
    """Exit code of a job that is over; None while it is not. Raises UserError when it cannot run as written."""
    accepted = find_condition(raw, "Accepted")
    if accepted.get("status") == "False" and accepted.get("observedGeneration") == raw["metadata"]["generation"]:
        raise UserError(f"{raw['metadata']['name']} is not accepted: {accepted.get('message', '')}")
    end = ended(raw)
    if not end:
        return None
    for line in status_report(raw):
        emit(line)
    return 0 if end["type"] == "Complete" else 1


def code_config_map(job: PolyRLJob, manifest: Path, namespace: str) -> Object | None:
    """The ConfigMap; None when the manifest names none. Raises UserError for a file that cannot be part of one."""
    name = job.spec.recipe.code.config_map
    if name is None:
        return None
    here = manifest.parent.resolve()
    folder = _own(here, job.spec.recipe.code.path, "spec.recipe.code.path")
    files = {path.name: path for path in sorted(folder.glob("*.py"))}
    model = job.spec.recipe.model.source
    elsewhere = model is not None and is_fetched(model, manifest.parent)
    for place, written, _ in named_files(job.spec.recipe):
        if Path(written).is_absolute() or (place == MODEL_PATH and elsewhere):
            continue
        file = here / written
        if file.resolve().parent != folder or not file.is_file():
            raise UserError(
                f"{path_text(place)}: {written} is no file directly in {folder}, so ConfigMap {name} cannot hold it;"
                " use recipe.code.volumeClaim or an image"
            )
        files[file.name] = file
    for file in files.values():
        _own(here, str(file), f"ConfigMap {name}")
    return _config_map(name, namespace, files)


def _own(here: Path, written: str, where: str) -> Path:
    """The file or folder, if it lies in the manifest's folder by its name and in truth: what is uploaded can be read by
    all who may read ConfigMaps. Raises UserError."""
    path = Path(os.path.normpath(here / written))
    if not path.is_relative_to(here) or path.resolve() != path:
        raise UserError(
            f"{where}: {written} lies outside of {here}, or a link leads there; nothing is uploaded but files of the"
            " manifest's own folder"
        )
    return path


def _config_map(name: str, namespace: str, files: dict[str, Path]) -> Object:
    data: dict[str, str] = {}
    binary: dict[str, str] = {}
    size = 0
    for key, file in files.items():
        if not _KEY.fullmatch(key):
            raise UserError(f"{file}: a ConfigMap's files are named by letters, digits, dots, dashes and underscores")
        content = file.read_bytes()
        size += len(key) + len(content)
        try:
            data[key] = content.decode()
        except UnicodeDecodeError:
            binary[key] = base64.b64encode(content).decode()
    if size > MAX_BYTES:
        largest = max(files.values(), key=lambda file: file.stat().st_size)
        raise UserError(
            f"spec.recipe.code.configMap: its files have {size:,} bytes, {largest} the most, and a ConfigMap takes"
            f" {MAX_BYTES:,}; use recipe.code.volumeClaim or an image"
        )
    metadata = {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/part-of": "polyrl"}}
    made: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
    return made | ({"binaryData": binary} if binary else {})
