"""A version's file of weights, mapped: shared by the agents that use it, and its pages used again by a later version.

The first touch of a page costs three times what writing to it costs, and to map it in another process or again a third
of that: who used a file keeps its map for when the file comes again. All of a file's room is taken when it is made, so
a full memory is refused there and then, and not by a signal at the first touch.

Who writes it holds its flock alone, who uses what lies there shares it; so nothing is written that somebody uses, and
the locks of a dead agent are free.

Other agents may be given bytes of it meanwhile: whoever copies some names the `life` in which he saw them, and gets
none of another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from pathlib import Path
from typing import Final

import msgspec

from polyrl.weights import VersionManifest
from polyrl.wire.sealing import LINE_BYTES

WEIGHTS_FILE: Final = "model.safetensors"
HEADER_ALIGNMENT: Final = LINE_BYTES
"""The header is padded with spaces so that the data begins at a multiple of this; safetensors itself asks for 8."""

POPULATE_READ: Final = 22
"""MADV_POPULATE_READ of Linux 5.14, which has no name in `mmap` yet."""


class WeightsFile:
    """A safetensors file, from its making to its release, under whatever name it lies."""

    def __init__(self, path: Path, descriptor: int, size: int, before: WeightsFile | None = None) -> None:
        """`descriptor` is of that file, locked, and belongs to this now. `before` may be what used this file last."""
        self.path, self.size, self._descriptor = path, size, descriptor
        self.manifest: VersionManifest | None = None
        """Manifest of the version that lies here whole, where that is known."""
        self.life, self._turn = 0, threading.Lock()
        found = os.fstat(descriptor)
        self._inode = (found.st_dev, found.st_ino)
        again = before is not None and before._inode == self._inode and before.size == size
        self._map: mmap.mmap = before._map if before is not None and again else mmap.mmap(descriptor, size)
        self._is_mapped: bool = before is not None and again and before._is_mapped
        """Page by page."""

    @staticmethod
    def make(path: Path, size: int) -> WeightsFile:
        """Raises OSError when there is no room for all of it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.posix_fallocate(descriptor, 0, size)
            return WeightsFile(path, descriptor, size)
        except OSError:
            path.unlink()
            os.close(descriptor)
            raise

    @staticmethod
    def opened(path: Path, *, alone: bool, before: WeightsFile | None = None) -> WeightsFile | None:
        """One that lies there, to be written (`alone`) or used; None: not there, or somebody's just now. `before`: one
        that was released, and may be the same."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            # It was taken for another version between these two lines otherwise.
            there = os.path.samestat(os.fstat(descriptor), path.lstat())
            if there and (size := os.fstat(descriptor).st_size):
                return WeightsFile(path, descriptor, size, before)
            if there and alone:
                path.unlink()  # whoever made it was killed before it had its room
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(descriptor)
        return None

    def begin(self, manifest: VersionManifest) -> memoryview:
        """Makes it a file of that version, whose stream is yet to be written: what is returned."""
        self.manifest = None
        self.renew()
        header = safetensors_header(manifest)
        self._map[: len(header)] = header
        return self.stream(manifest)

    def stream(self, manifest: VersionManifest) -> memoryview:
        """uint8[stream_bytes] of the version that lies here."""
        return memoryview(self._map)[len(safetensors_header(manifest)) :]

    def populate(self, begin: int, size: int) -> None:
        """Maps the pages of those bytes of the file, which are written next: one call for all of them takes a tenth of
        what as many faults at their first writes take, half of a receiver's time."""
        if self._is_mapped:
            return
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):  # an older system: each page by itself, then
            self._map.madvise(POPULATE_READ, first, begin + size - first)

    def is_of(self, manifest: VersionManifest) -> bool:
        """By its size and what engines read first."""
        header = safetensors_header(manifest)
        return self.size == len(header) + manifest.stream_bytes and self._map[: len(header)] == header

    def renew(self) -> None:
        """What lies here will change: from now on nobody copies what lay here before."""
        with self._turn:
            self.life += 1

    def copy(self, life: int, source: memoryview) -> bytearray | None:
        """A copy of a part of the file's stream, while it is in that life; None afterwards."""
        with self._turn:
            return bytearray(source) if life == self.life else None

    def move(self, path: Path) -> None:
        self.path.rename(path)
        self.path = path

    def share(self) -> None:
        """It is written: from now on others may use it, and nobody writes it."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        self._is_mapped = True

    def release(self) -> None:
        """Whoever needs pages may write it now, if nobody else uses it; idempotent. The memory is free once it is
        removed and nobody has a view of it, or this."""
        self.renew()
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # the mapping has a duplicate of it, which lives on
            os.close(self._descriptor)
            self._descriptor = -1


def safetensors_header(manifest: VersionManifest) -> bytes:
    """The header of model.safetensors: uint64 length, then JSON, padded with spaces."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for tensor in manifest.tensors:
        ends = [tensor.offset, tensor.offset + tensor.size]
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": ends}
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
