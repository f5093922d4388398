"""Where an engine's weights lie while they arrive and while they are served: one folder in memory per engine.

    polyrl-<run>-<engine>-<random>/.lock    held while the agent lives; whoever gets it may remove the folder
    .../v000007.partial/                    chunks land here, each at its place; what matches is not pulled again
    .../v000007/                            complete: every chunk and tensor matched; a Hugging Face folder

A version's folder appears by one rename, so it is complete or absent. Only the served version and the one on its way
stay. The stream of a version is the data section of model.safetensors byte for byte, so assembling costs no copy.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from polyrl.errors import ProtocolError
from polyrl.weights import Receipt, VersionManifest, chunk_places, digest, tensor_matches

MEMORY: Final = Path("/dev/shm")
PREFIX: Final = "polyrl-"
WEIGHTS_FILE: Final = "model.safetensors"
NAME_BYTES: Final = 4
"""Bytes of randomness in a folder's name."""
HEADER_ALIGNMENT: Final = 8
"""safetensors pads its header with spaces so that the data begins at a multiple of this."""


@dataclass(frozen=True)
class Staged:
    """A complete, verified version on disk or in memory."""

    manifest: VersionManifest
    folder: Path
    receipt: bytes
    """`weights.Receipt` of it."""

    @property
    def version(self) -> int:
        return self.manifest.version


class Partial:
    """A version that is being put together."""

    def __init__(self, folder: Path, manifest: VersionManifest) -> None:
        """Raises OSError when there is no room for all of it."""
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder, self._manifest = folder, manifest
        self._places = chunk_places(manifest)
        self._header = safetensors_header(manifest)
        self._file = (folder / WEIGHTS_FILE).open("r+b" if (folder / WEIGHTS_FILE).exists() else "w+b")
        os.ftruncate(self._file.fileno(), len(self._header) + manifest.total_bytes)
        os.pwrite(self._file.fileno(), self._header, 0)

    def held(self) -> set[bytes]:
        """Hashes of the chunks that an interrupted pull left in place; their content is hashed again."""
        with self._stream() as stream:
            return {
                hash_
                for hash_, places in self._places.items()
                if all(digest(stream[offset : offset + size]) == hash_ for offset, size in places)
            }

    def write(self, hash_: bytes, data: bytes | memoryview) -> None:
        """Puts a chunk, already verified, at its places. Raises OSError when memory is full."""
        for offset, _ in self._places[hash_]:
            os.pwrite(self._file.fileno(), data, len(self._header) + offset)

    def reuse(self, other: Staged, wanted: set[bytes]) -> set[bytes]:
        """Copies those of the `wanted` chunks that `other` has; returns their hashes."""
        common = {hash_: places[0] for hash_, places in chunk_places(other.manifest).items() if hash_ in wanted}
        begin = len(safetensors_header(other.manifest))
        with (other.folder / WEIGHTS_FILE).open("rb") as source:
            for hash_, (offset, size) in common.items():
                self.write(hash_, os.pread(source.fileno(), size, begin + offset))
        return set(common)

    def finish(self, target: Path) -> Staged:
        """Verifies every tensor, adds the small files and makes the folder appear as `target`.

        Raises ProtocolError naming the first tensor whose bytes are not what the manifest says.
        """
        with self._stream() as stream:
            for tensor in self._manifest.tensors:
                if not tensor_matches(tensor, stream):
                    raise ProtocolError(f"tensor {tensor.name} of version {self._manifest.version} fails its checksum")
            receipt = self._receipt(stream)
        for file in self._manifest.files:
            (self._folder / file.name).write_bytes(file.content)
        self.close()
        self._folder.rename(target)
        return Staged(self._manifest, target, receipt=receipt)

    def _receipt(self, stream: memoryview) -> bytes:
        receipt, offset = Receipt(), 0
        for chunk in self._manifest.chunks:
            receipt.add(stream[offset : offset + chunk.size])
            offset += chunk.size
        return receipt.value

    def close(self) -> None:
        """Leaves what has arrived where it is."""
        self._file.close()

    @contextmanager
    def _stream(self) -> Iterator[memoryview]:
        if not self._manifest.total_bytes:
            yield memoryview(b"")
            return
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as whole:
            stream = whole[len(self._header) :]
            try:
                yield stream
            finally:
                stream.release()


class Staging:
    """The folder of one engine."""

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

    def open(self, manifest: VersionManifest) -> Partial:
        """A place for `manifest`; what an interrupted pull of the same version left is still in it."""
        wanted = self.root / f"v{manifest.version:06d}.partial"
        for other in self.root.glob("v*.partial"):
            if other != wanted:
                shutil.rmtree(other, ignore_errors=True)
        return Partial(wanted, manifest)

    def finish(self, partial: Partial, version: int) -> Staged:
        """See `Partial.finish`; a folder of an earlier life of the same version gives way."""
        target = self.root / f"v{version:06d}"
        shutil.rmtree(target, ignore_errors=True)
        return partial.finish(target)

    def discard(self, version: int) -> None:
        """Forgets what has arrived of a version: some of it was false."""
        shutil.rmtree(self.root / f"v{version:06d}.partial", ignore_errors=True)

    def keep_only(self, version: int) -> None:
        """Removes all complete versions but this one."""
        for folder in self.root.glob("v*[0-9]"):
            if folder.name != f"v{version:06d}":
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Removes everything; idempotent."""
        shutil.rmtree(self.root, ignore_errors=True)
        self._lock.close()


def safetensors_header(manifest: VersionManifest) -> bytes:
    """The header of model.safetensors: uint64 length, then JSON, padded with spaces."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for tensor in manifest.tensors:
        ends = [tensor.offset, tensor.offset + tensor.size]
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": ends}
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


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
