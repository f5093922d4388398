"""`polyrl get JOB DIR`: the model, the metrics and the result of a job on a cluster, into a folder here.

    trainer's pod (or a reader pod, when it has ended) ── exec: read_in_container ──> one stream ──> checked files

Nothing that comes decides where it is written: names are those that were asked for, sizes and checksums those of the
checkpoint's seal, and the folder appears when all of it has come.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.errors import UNDECODABLE, RunFailed, UserError
from polyrl.worker import Role
from polyrl_cli.model.export import complete_card
from polyrl_cli.model.sealed import LEARNERS_OWN, MODEL, CheckpointFiles, check_sealed, new_folder, require_room
from polyrl_cli.remote import read_in_container
from polyrl_cli.remote.chaos import live_workers
from polyrl_cli.remote.cluster import ClusterOptions, UserCluster, user_cluster
from polyrl_cli.remote.execution import output_of
from polyrl_cli.remote.reader_pod import CONTAINER, running_reader
from polyrl_operator.api.kinds import POD, TRAINER

RESULT: Final = "trainer-result.json"
BESIDE: Final = ("metrics.jsonl", "samples.jsonl", RESULT)
"""Files of the run that come as well, if there are any."""

PIECE_WAIT_S: Final = 60.0
"""Longest wait for the next PIECE_BYTES."""
PIECE_BYTES: Final = 1 << 20
"""17 kB/s, a modem twice over: whoever sends a byte a minute would be waited for until the end of days."""
MAX_OFFER_BYTES: Final = 16 << 20
"""Bytes of the list of files; a checkpoint has tens."""

Emit = Callable[[str], None]


class Offer(msgspec.Struct, frozen=True):
    """The first line that comes."""

    checkpoint: str = ""
    """Empty: there is none such."""
    seal: CheckpointFiles = CheckpointFiles({})
    files: list[tuple[str, int]] = []
    kept: list[str] = []


class ByteReader:
    """A stream of bytes, taken line by line and file by file."""

    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self._parts, self._left = parts, b""
        self._waited, self._came = 0.0, 0
        """Seconds and bytes of the newest PIECE_BYTES."""

    async def line(self) -> bytes:
        """Up to the next line end. Raises RunFailed when none comes."""
        while b"\n" not in self._left:
            if len(self._left) > MAX_OFFER_BYTES:
                raise RunFailed("the cluster sends no list of files but something longer")
            self._left += await self._next()
        line, _, self._left = self._left.partition(b"\n")
        return line

    async def copy(self, size: int, file: BinaryIO) -> None:
        """Exactly `size` bytes. Raises RunFailed when they do not come."""
        while size:
            part = self._left or await self._next()
            file.write(part[:size])
            size, self._left = size - min(size, len(part)), part[size:]

    async def _next(self) -> bytes:
        began = time.monotonic()
        try:
            async with asyncio.timeout(PIECE_WAIT_S - self._waited):
                part = await anext(self._parts, None)
        except TimeoutError:
            raise RunFailed(f"{self._came:,} bytes came within {PIECE_WAIT_S:g} s; try again") from None
        if part is None:
            raise RunFailed("the connection broke off before all had come; try again")
        # What is done with the bytes between two waits is nobody else's fault.
        self._waited, self._came = self._waited + time.monotonic() - began, self._came + len(part)
        if self._came >= PIECE_BYTES:
            self._waited, self._came = 0.0, 0
        return part


def get_from_cluster(job: str, target: Path, step: int | None, options: ClusterOptions, emit: Emit) -> None:
    """Fetches into the new folder `target`. Raises UserError when there is nothing to fetch or the cluster refuses,
    RunFailed when it breaks off."""

    async def fetch() -> None:
        async with user_cluster(options) as cluster:
            stored = await cluster.job(job)
            with new_folder(target) as folder:
                async with _place(cluster, stored) as (pod, container, python):
                    command = reading_command(python, step)
                    async with aclosing(output_of(cluster, pod, container, command)) as output:
                        offer = await receive(ByteReader(output), folder, job, step)
                complete_card(folder / MODEL, folder / RESULT)
                _describe(stored, folder)
            size = sum(size for _, size in offer.files)
            emit(f"{target}: the model of {offer.checkpoint}, {len(offer.files)} files, {size:,} bytes")

    asyncio.run(fetch())


def reading_command(python: str, step: int | None) -> tuple[str, ...]:
    """What is run in the container."""
    order = {"run": names.RUN_DIR, "step": step, "leave": LEARNERS_OWN, "beside": BESIDE}
    return python, "-c", Path(read_in_container.__file__).read_text(), json.dumps(order)


async def receive(reader: ByteReader, folder: Path, job: str, step: int | None) -> Offer:
    """Writes what comes into `folder`, and gives what it was. Raises UserError and RunFailed as above."""
    try:
        offer = msgspec.json.decode(await reader.line(), type=Offer)
    except UNDECODABLE as error:
        raise RunFailed(f"the cluster sends no list of files: {error}") from error
    if not offer.checkpoint:
        kept = f"the job has kept {', '.join(offer.kept)}" if offer.kept else "it has no complete checkpoint yet"
        raise UserError(f"{job}: {kept}" if step is None or not offer.kept else f"--step {step}: {kept}")
    check_offer(offer, shutil.disk_usage(folder).free)
    sealed = offer.seal.of_model()
    for name, size in offer.files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            await reader.copy(size, file)
        if name not in BESIDE:
            check_sealed(path, sealed[name.removeprefix(f"{MODEL}/")])
    return offer


def check_offer(offer: Offer, free_bytes: int) -> None:
    """Raises RunFailed for files that nobody asked for, that are missing, or of another size than sealed; UserError
    when there is no room."""
    model = {f"{MODEL}/{name}": sealed.size for name, sealed in offer.seal.of_model().items()}
    found = dict(offer.files)
    if len(found) != len(offer.files) or found.keys() - set(BESIDE) != model.keys():
        raise RunFailed("the cluster offers other files than the checkpoint was sealed with")
    if wrong := [name for name, size in model.items() if found[name] != size]:
        raise RunFailed(f"{wrong[0]}: is not what the checkpoint was sealed with (size)")
    require_room(found.values(), free_bytes)


@asynccontextmanager
async def _place(cluster: UserCluster, job: Object) -> AsyncIterator[tuple[str, str, str]]:
    """Pod, container and Python from where the run's folder is read."""
    name = job["metadata"]["name"]
    pages = cluster.client.pages(POD, cluster.namespace, names.selector(name, Role.TRAINER))
    pods = [pod async for page, _ in pages for pod in page]
    at_work = next((one for one in live_workers(pods) if one.seen.role is Role.TRAINER), None)
    if at_work is not None:
        yield at_work.pod, at_work.container, at_work.argv[0]
        return
    trainer = await cluster.client.get(TRAINER, cluster.namespace, names.trainer_name(name))
    if trainer is None:
        raise UserError(f"{name} has no trainer in namespace {cluster.namespace} yet")
    async with running_reader(cluster, job, trainer) as pod:
        yield pod, CONTAINER, trainer["spec"]["template"]["spec"]["containers"][0]["command"][0]


def _describe(job: Object, folder: Path) -> None:
    """job.json as a local run has it, so that what reads runs reads this folder; and how the job fared."""
    metadata = {"name": job["metadata"]["name"]}
    made = {"apiVersion": job["apiVersion"], "kind": job["kind"], "metadata": metadata, "spec": job["spec"]}
    for name, content in {"job.json": made, "status.json": job.get("status") or {}}.items():
        (folder / name).write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
