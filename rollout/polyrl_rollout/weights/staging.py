"""Where weights lie while they arrive and while they are served: one folder in memory for all agents of a run here.

    polyrl-<run>-<key>/                     see `shared_folder`; what follows is changed by whoever has the turn
    .../v000007-<hash>.partial/             chunks land here, each at its place; what has come is not pulled again
    .../v000007-<hash>/                     complete: every tensor matched; a Hugging Face folder

A version's folder appears by one rename, so it is complete or absent; each agent checks every tensor before it uses it.
A version that nobody uses lends its pages to the next one, so there is one file of weights for each version that is
served, and one. The stream of a version is the data section of model.safetensors byte for byte, so assembling costs no
copy.
"""

from __future__ import annotations

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
import structlog

from polyrl.errors import ProtocolError
from polyrl.weights import (
    ChunkEntry,
    FileEntry,
    StreamCheck,
    TensorEntry,
    VersionManifest,
    chunk_places,
    digest,
    encode_manifest,
    manifest_hash,
    same_layout,
)
from polyrl.weights.deltas import EachOf, apply_delta
from polyrl_rollout.weights.pages import WEIGHTS_FILE, WeightsFile, safetensors_header
from polyrl_rollout.weights.shared_folder import NAME_BYTES, SharedFolder

MEMORY: Final = Path("/dev/shm")
PARTIAL: Final = ".partial"

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Staged:
    """A complete, verified version on disk or in memory."""

    manifest: VersionManifest
    folder: Path
    receipt: bytes
    """`weights.receipt_of` it."""
    file: WeightsFile
    files: tuple[FileEntry, ...] = ()
    """Files of the anchor that the version comes from."""

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
        """For an anchor. `file` is of the version's size; what it holds of the version already counts as come."""
        self.manifest, self.file, self._folder = manifest, file, folder
        self.files = manifest.files
        self._places = chunk_places(manifest)
        self._verified = set[str]()
        before = file.manifest
        self.have = _in_place(manifest, before) if before is not None else set[bytes]()
        """Hashes of chunks that have come."""
        self._waiting = _tensors_by_chunk(manifest, self.have)
        self._stream = file.begin(manifest)
        self._check = StreamCheck(self._stream)
        self._life = file.life

    def resume(self) -> None:
        """Another agent has written some of it, and died or gave up: what its hashes say counts as come."""
        self.have = set(self._places)
        self.drop_false()
        self._waiting = _tensors_by_chunk(self.manifest, self.have)

    def place(self, chunk: ChunkEntry) -> memoryview:
        """Where a chunk is to be written."""
        offset, size = self._places[chunk.hash][0]
        self.file.populate(self.file.size - self.manifest.stream_bytes + offset, size)
        return self._stream[offset : offset + size]

    def read(self, chunk: ChunkEntry) -> bytearray | None:
        """A copy of a chunk that has come, for as long as chunks are what lies here."""
        return self.file.copy(self._life, self.place(chunk)) if chunk.hash in self.have else None

    def take(self, chunk: ChunkEntry) -> list[TensorEntry]:
        """The chunk lies in its place, and is copied wherever else it belongs. One thread at a time; returns the
        tensors that are whole by it."""
        begin, size = self._places[chunk.hash][0]
        for offset, _ in self._places[chunk.hash][1:]:
            self._stream[offset : offset + size] = self._stream[begin : begin + size]
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
        self.file.renew()
        self.have.clear()  # in place: it is the inventory that others are given
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
        if self._check.matches(tensor):
            self._verified.add(tensor.name)

    def verify(self, each: EachOf = map) -> None:
        """Raises ProtocolError naming the first tensor whose bytes are not what the manifest says."""
        for tensor, matches in zip(self.manifest.tensors, each(self._matches, self.manifest.tensors), strict=True):
            if not matches:
                raise ProtocolError(f"tensor {tensor.name} of version {self.manifest.version} fails its checksum")
            self._verified.add(tensor.name)

    def _matches(self, tensor: TensorEntry) -> bool:
        return tensor.name in self._verified or self._check.matches(tensor)

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
            with (self._folder / file.name).open("wb") as small:
                os.fchmod(small.fileno(), 0o600)
                small.write(file.content)
        self.file.share()
        self._folder.rename(target)
        self.file.path, self.file.manifest = target / WEIGHTS_FILE, self.manifest
        return Staged(self.manifest, target, receipt=self._check.receipt(), file=self.file, files=self.files)


class Staging:
    """An agent's part in the folder; one thread at a time. All but `find` and `keep_only` need the turn."""

    def __init__(self, run: str, key: str, base: Path | None = None) -> None:
        """Makes the folder, private to this user, or joins those that gave the same run and key; removes what ended
        agents left behind."""
        self._base, self._name = base or default_base(), f"{_plain(run)}-{_plain(key)}"
        self._folders = [SharedFolder(self._base, self._name)]
        """The last one is in use; those before it hold what is still served."""
        self._partial: Partial | None = None
        self._used: dict[Path, WeightsFile] = {}
        self._known: dict[Path, VersionManifest] = {}
        """Manifests of complete folders, as far as this agent knows them; some folders may be gone."""
        self._before: WeightsFile | None = None
        """Used no more, for its map: the next version takes its pages. One at most, until then."""
        self._false = set[Path]()

    @property
    def root(self) -> Path:
        return self._folders[-1].path

    @property
    def turn(self) -> SharedFolder:
        """Whose turn it is."""
        return self._folders[-1]

    def give_back_turn(self) -> None:
        """What has come of a version that is not whole is for whoever has the turn next."""
        self._drop_partial()
        self.turn.give_back_turn()

    def leave(self) -> None:
        """Goes on in a folder that nobody else knows: whoever has the turn here never gives it back."""
        self._folders.append(SharedFolder(self._base, f"{self._name}-{secrets.token_hex(NAME_BYTES)}"))

    def find(self, manifest: VersionManifest, files: tuple[FileEntry, ...], each: EachOf = map) -> Staged | None:
        """The version, if it lies here complete and is, to the last tensor and file, what the manifest says."""
        folder = self.root / name_of(manifest)
        if folder in self._false:
            return None
        file = self._used.get(folder) or WeightsFile.opened(folder / WEIGHTS_FILE, alone=False, before=self._before)
        if file is None:
            return None
        self._before = None
        check = StreamCheck(file.stream(manifest)) if file.is_of(manifest) and _has_files(folder, files) else None
        if check is None or not all(each(check.matches, manifest.tensors)):
            log.warning("a version on this machine is false", folder=str(folder))
            self._false.add(folder)
            self._used.pop(folder, None)
            file.release()
            return None
        self._used[folder], self._known[folder], file.manifest = file, manifest, manifest
        return Staged(manifest, folder, receipt=check.receipt(), file=file, files=files)

    def open(self, manifest: VersionManifest) -> Partial:
        """A place for an anchor; what an interrupted pull of the same one left is still in it, whoever's it was. Raises
        OSError when memory is full."""
        if self._partial is not None and self._partial.manifest == manifest:
            return self._partial
        self._drop_partial()
        folder = self.root / f"{name_of(manifest)}{PARTIAL}"
        size = len(safetensors_header(manifest)) + manifest.stream_bytes
        file, begun = self._pages(folder, size)
        folder.mkdir(mode=0o700, exist_ok=True)
        if file is None:
            file = WeightsFile.make(folder / WEIGHTS_FILE, size)
        elif not begun:
            left = file.path.parent
            file.move(folder / WEIGHTS_FILE)
            shutil.rmtree(left, ignore_errors=True)
        self._partial = Partial(folder, manifest, file)
        if begun:
            self._partial.resume()
        return self._partial

    def copy_of(self, staged: Staged) -> Partial:
        """A place with what `staged` is, for deltas on it. Raises OSError when memory is full."""
        partial = self.open(
            msgspec.structs.replace(staged.manifest, base=None, kind="anchor", chunks=(), base_hash=b"")
        )
        partial.copy(staged)
        return partial

    def finish(self, partial: Partial) -> Staged:
        """See `Partial.finish`."""
        target = self.root / name_of(partial.manifest)
        if target.exists():  # and is false, and in use all the same: others judge for themselves
            target = target.with_name(f"{target.name}-{secrets.token_hex(NAME_BYTES)}")
        staged = partial.finish(target)
        self._partial = None
        self._used[target], self._known[target] = staged.file, staged.manifest
        self._false.discard(target)
        return staged

    def keep_only(self, version: int) -> None:
        """Uses no complete version but this one any more."""
        for folder, file in list(self._used.items()):
            if file.manifest is None or file.manifest.version != version:
                del self._used[folder]
                file.release()
                self._before = file

    def close(self) -> None:
        """Removes everything that nobody else uses; idempotent."""
        self._drop_partial()
        for file in self._used.values():
            file.release()
        self._used.clear()
        self._before = None
        for folder in self._folders:
            folder.close()

    def _drop_partial(self) -> None:
        if self._partial is not None:
            self._partial.file.release()
            self._partial = None

    def _pages(self, wanted: Path, size: int) -> tuple[WeightsFile | None, bool]:
        """Pages of that size that nobody uses, and whether they are those of `wanted`; all else that nobody uses is
        removed."""
        found: WeightsFile | None = None
        for folder in sorted(self.root.glob("v*"), key=lambda folder: folder != wanted):
            file = WeightsFile.opened(folder / WEIGHTS_FILE, alone=True, before=self._before)
            if file is None and (folder / WEIGHTS_FILE).exists():
                continue  # somebody's
            if file is not None and found is None and file.size == size:
                found, file.manifest = file, self._known.get(folder)
                continue
            if file is not None:
                file.release()
            shutil.rmtree(folder, ignore_errors=True)
        self._before = None
        self._known = {folder: known for folder, known in self._known.items() if folder in self._used}
        return found, found is not None and found.path.parent == wanted


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


def name_of(manifest: VersionManifest) -> str:
    """Name of a complete version's folder."""
    return f"v{manifest.version:06d}-{manifest_hash(encode_manifest(manifest)).hex()}"


def _has_files(folder: Path, files: tuple[FileEntry, ...]) -> bool:
    if {path.name for path in folder.iterdir()} != {WEIGHTS_FILE, *(file.name for file in files)}:
        return False
    return all((folder / file.name).read_bytes() == file.content for file in files)


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)
