"""Where an engine's weights lie while they arrive and while they are served: one folder in memory per engine.

    polyrl-<run>-<engine>-<random>/.lock    held while the agent lives; whoever gets it may remove the folder
    .../v000007.partial/                    chunks land here, each at its place; what has come is not pulled again
    .../v000007/                            complete: every tensor matched; a Hugging Face folder
    .../spare                               the file of the version before, whose pages the next one uses

A version's folder appears by one rename, so it is complete or absent. Only the served version and the one on its way
stay. The stream of a version is the data section of model.safetensors byte for byte, so assembling costs no copy.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import tempfile
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from polyrl.errors import ProtocolError
from polyrl.weights import (
    ChunkEntry,
    FileEntry,
    TensorEntry,
    VersionManifest,
    chunk_places,
    digest,
    receipt_of,
    same_layout,
    tensor_matches,
)
from polyrl.weights.deltas import EachOf, apply_delta
from polyrl_rollout.weights.pages import WEIGHTS_FILE, WeightsFile, safetensors_header

MEMORY: Final = Path("/dev/shm")
PREFIX: Final = "polyrl-"
SPARE: Final = "spare"
NAME_BYTES: Final = 4
"""Bytes of randomness in a folder's name."""


@dataclass(frozen=True)
class Staged:
    """A complete, verified version on disk or in memory."""

    manifest: VersionManifest
    folder: Path
    receipt: bytes
    """`weights.receipt_of` it."""
    file: WeightsFile
    files: tuple[FileEntry, ...] = ()
    """Of the anchor that it comes from."""

    @property
    def version(self) -> int:
        return self.manifest.version


@dataclass(frozen=True, eq=False)
class _Lacks:
    """A tensor, and the hashes of its chunks that have not come."""

    tensor: TensorEntry
    chunks: set[bytes]


class Partial:
    """A version that is being put together: an anchor's chunks, or a copy of what lies here, and then deltas on it.

    Several threads may write, each its own chunks."""

    def __init__(self, folder: Path, manifest: VersionManifest, file: WeightsFile) -> None:
        """Of an anchor. `file` is of the version's size; what it holds of the version already counts as come."""
        folder.mkdir(mode=0o700, exist_ok=True)
        self.manifest, self.file, self._folder = manifest, file, folder
        self.files = manifest.files
        self._places = chunk_places(manifest)
        self._verified = set[str]()
        before = file.manifest
        self.have = _in_place(manifest, before) if before is not None else set[bytes]()
        """Hashes of chunks that have come."""
        self._waiting = _tensors_by_chunk(manifest, self.have)
        self._stream = file.begin(manifest)
        file.move(folder / WEIGHTS_FILE)

    def place(self, chunk: ChunkEntry) -> memoryview:
        """Where a chunk is to be written."""
        offset, size = self._places[chunk.hash][0]
        return self._stream[offset : offset + size]

    def take(self, chunk: ChunkEntry) -> list[TensorEntry]:
        """The chunk lies in its place, and is copied wherever else it belongs. One thread at a time; returns the
        tensors that are whole by it."""
        first = self.place(chunk)
        for offset, size in self._places[chunk.hash][1:]:
            self._stream[offset : offset + size] = first
        self.have.add(chunk.hash)
        waiting = self._waiting.pop(chunk.hash, ())
        for lacks in waiting:
            lacks.chunks.discard(chunk.hash)
        return [lacks.tensor for lacks in waiting if not lacks.chunks]

    def copy(self, other: Staged) -> None:
        """Makes it the version that `other` is, which has the same layout; `other` stays as it is."""
        np.copyto(np.frombuffer(self._stream, np.uint8), np.frombuffer(other.file.stream(other.manifest), np.uint8))
        self.manifest, self.files = other.manifest, other.files

    def apply(self, manifest: VersionManifest, delta: memoryview, each: EachOf) -> None:
        """Makes it the version of `manifest`, a delta on what it is. Raises ProtocolError for one that cannot be; then
        it is no version any more."""
        if manifest.base != self.manifest.version or not same_layout(manifest.tensors, self.manifest.tensors):
            raise ProtocolError(f"version {manifest.version} is no delta on version {self.manifest.version}")
        apply_delta(delta, self._stream, each)
        self.manifest = manifest
        self._verified.clear()

    def reuse(self, other: Staged) -> None:
        """Copies the chunks that `other` has, an anchor too."""
        if other.manifest.kind != "anchor":
            return
        theirs, source = chunk_places(other.manifest), other.file.stream(other.manifest)
        for chunk in self.manifest.chunks:
            if chunk.hash in theirs and chunk.hash not in self.have:
                offset, size = theirs[chunk.hash][0]
                self.place(chunk)[:] = source[offset : offset + size]
                self.take(chunk)

    def verify_tensor(self, tensor: TensorEntry) -> None:
        """Once its last chunk is taken, by whichever thread has the time; one that fails is left to `verify`."""
        if tensor_matches(tensor, self._stream):
            self._verified.add(tensor.name)

    def verify(self, each: EachOf = map) -> None:
        """Raises ProtocolError naming the first tensor whose bytes are not what the manifest says."""
        for tensor, matches in zip(self.manifest.tensors, each(self._matches, self.manifest.tensors), strict=True):
            if not matches:
                raise ProtocolError(f"tensor {tensor.name} of version {self.manifest.version} fails its checksum")
            self._verified.add(tensor.name)

    def _matches(self, tensor: TensorEntry) -> bool:
        return tensor.name in self._verified or tensor_matches(tensor, self._stream)

    def drop_false(self) -> int:
        """Hashes all that has come, and forgets the chunks that are others; how many."""
        false = {
            hash_
            for hash_ in self.have
            if any(digest(self._stream[offset : offset + size]) != hash_ for offset, size in self._places[hash_])
        }
        self.have -= false
        self._verified.clear()
        self._waiting.clear()
        return len(false)

    def finish(self, target: Path) -> Staged:
        """Adds the small files and makes the verified folder appear as `target`."""
        for file in self.files:
            (self._folder / file.name).write_bytes(file.content)
        self._folder.rename(target)
        self.file.path, self.file.manifest = target / WEIGHTS_FILE, self.manifest
        return Staged(self.manifest, target, receipt=receipt_of(self._stream), file=self.file, files=self.files)


class Staging:
    """The folder of one engine; one thread at a time."""

    def __init__(self, run: str, engine: str, base: Path | None = None) -> None:
        """Makes the folder, private to this user, and removes what ended engines left behind."""
        base = base or default_base()
        sweep(base)
        # Random, because two runs of one job beside each other have engines of one name.
        self.root = base / f"{PREFIX}{_plain(run)}-{_plain(engine)}-{secrets.token_hex(NAME_BYTES)}"
        # Locked before it takes a name that a sweep finds.
        unnamed = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=base))
        self._lock = (unnamed / ".lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(self.root)
        self._partial: Partial | None = None
        self._spare: WeightsFile | None = None
        self._complete: dict[int, WeightsFile] = {}

    def open(self, manifest: VersionManifest) -> Partial:
        """A place for an anchor; what an interrupted pull of the same one left is still in it. Raises OSError when
        memory is full."""
        if self._partial is not None and self._partial.manifest == manifest:
            return self._partial
        self.discard()
        size = len(safetensors_header(manifest)) + manifest.stream_bytes
        file, self._spare = self._spare, None
        if file is not None and file.size != size:
            file.remove()
            file = None
        file = file or WeightsFile(self.root / SPARE, size)
        self._partial = Partial(self.root / f"v{manifest.version:06d}.partial", manifest, file)
        return self._partial

    def copy_of(self, staged: Staged) -> Partial:
        """A place with what `staged` is, for deltas on it. Raises OSError when memory is full."""
        partial = self.open(
            msgspec.structs.replace(staged.manifest, base=None, kind="anchor", chunks=(), base_hash=b"")
        )
        partial.copy(staged)
        return partial

    def finish(self, partial: Partial) -> Staged:
        """See `Partial.finish`; a folder of an earlier life of the same version gives way."""
        version = partial.manifest.version
        target = self.root / f"v{version:06d}"
        self._complete.pop(version, None)
        shutil.rmtree(target, ignore_errors=True)
        staged = partial.finish(target)
        self._partial, self._complete[version] = None, staged.file
        return staged

    def discard(self) -> None:
        """Forgets what has arrived of the version on its way: some of it was false, or nobody wants it any more."""
        if self._partial is not None:
            self._keep(self._partial.file)
        self._partial = None
        for folder in self.root.glob("v*.partial"):
            shutil.rmtree(folder, ignore_errors=True)

    def keep_only(self, version: int) -> None:
        """Removes all complete versions but this one."""
        for other in self._complete.keys() - {version}:
            self._keep(self._complete.pop(other))
        for folder in self.root.glob("v*[0-9]"):
            if folder.name != f"v{version:06d}":
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Removes everything; idempotent."""
        shutil.rmtree(self.root, ignore_errors=True)
        self._lock.close()

    def _keep(self, file: WeightsFile) -> None:
        """Pages for the version that comes next; one file's at most."""
        if self._spare is not None:
            self._spare.remove()
        file.move(self.root / SPARE)
        self._spare = file


def _tensors_by_chunk(manifest: VersionManifest, have: set[bytes]) -> dict[bytes, list[_Lacks]]:
    begins = list(accumulate((chunk.size for chunk in manifest.chunks), initial=0))
    waiting = defaultdict[bytes, list[_Lacks]](list)
    for tensor in manifest.tensors:
        covering = slice(bisect_right(begins, tensor.offset) - 1, bisect_left(begins, tensor.offset + tensor.size))
        lacks = _Lacks(tensor, {chunk.hash for chunk in manifest.chunks[covering]} - have)
        for hash_ in lacks.chunks:
            waiting[hash_].append(lacks)
    return waiting


def _in_place(manifest: VersionManifest, before: VersionManifest) -> set[bytes]:
    """Chunks that lie in a file of the version `before` where they belong in one of `manifest`."""
    if before.kind != "anchor" or safetensors_header(before) != safetensors_header(manifest):
        return set()
    old, new = chunk_places(before), chunk_places(manifest)
    return {hash_ for hash_, places in new.items() if set(places) <= set(old.get(hash_, ()))}


def default_base() -> Path:
    """Shared memory where there is some, so that an engine in another process loads without a disk."""
    return MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def sweep(base: Path) -> None:
    """Removes folders of engines that were killed: their lock is free. Folders of other users are left alone."""
    for folder in base.glob(f"{PREFIX}*"):
        lock = folder / ".lock"
        try:
            with lock.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)
