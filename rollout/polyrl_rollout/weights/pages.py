"""A version's file of weights, mapped: pages that are used again by a later version of the same size.

The first touch of a page costs three times what writing to it costs. All of a file's room is taken when it is made, so
a full memory is refused there and then, and not by a signal at the first touch.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Final

import msgspec

from polyrl.weights import VersionManifest

WEIGHTS_FILE: Final = "model.safetensors"
HEADER_ALIGNMENT: Final = 8
"""safetensors pads its header with spaces so that the data begins at a multiple of this."""


class WeightsFile:
    """A safetensors file, from its making to its end, under whatever name it lies."""

    def __init__(self, path: Path, size: int) -> None:
        """Raises OSError when there is no room for all of it."""
        self.path, self.size = path, size
        self.manifest: VersionManifest | None = None
        """Of the version that lies here whole."""
        with path.open("w+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError:
                path.unlink()
                raise
            self._map = mmap.mmap(file.fileno(), size)

    def begin(self, manifest: VersionManifest) -> memoryview:
        """Makes it a file of that version, whose stream is yet to be written: what is returned."""
        self.manifest = None
        header = safetensors_header(manifest)
        self._map[: len(header)] = header
        return self.stream(manifest)

    def stream(self, manifest: VersionManifest) -> memoryview:
        """uint8[stream_bytes] of the version that lies here."""
        return memoryview(self._map)[len(safetensors_header(manifest)) :]

    def move(self, path: Path) -> None:
        self.path.rename(path)
        self.path = path

    def remove(self) -> None:
        """The pages are free once nobody has a view of them."""
        self.path.unlink(missing_ok=True)


def safetensors_header(manifest: VersionManifest) -> bytes:
    """The header of model.safetensors: uint64 length, then JSON, padded with spaces."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for tensor in manifest.tensors:
        ends = [tensor.offset, tensor.offset + tensor.size]
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": ends}
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
