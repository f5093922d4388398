"""The images of a machine in the memory of each of its ranks, mapped once.

A map's pages cost a fault each when they are first written, about as much as their copying, and images are used again.
What their maker has no more use for it empties, so that a map which stays holds no memory.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

from polyrl_trainer.backend import BufferPlace

MAX_MAPPED: Final = 16
"""More images than a publisher has in use at once."""


class MappedImages:
    """Images that one rank has mapped."""

    def __init__(self) -> None:
        self._mapped: dict[str, memoryview] = {}

    def find(self, buffer: BufferPlace) -> memoryview:
        """uint8[end - begin]. Raises OSError where it cannot be mapped."""
        if buffer.name not in self._mapped:
            # Something else may be there, if its maker is gone, which is not opened to find that out.
            if os.readlink(buffer.path) != f"/memfd:{buffer.name} (deleted)":
                raise OSError(f"{buffer.path} is not the image {buffer.name} of this machine")
            while len(self._mapped) >= MAX_MAPPED:
                del self._mapped[next(iter(self._mapped))]
            self._mapped[buffer.name] = _map(buffer.path, buffer.end - buffer.begin)
        return self._mapped[buffer.name]


def _map(path: str, size: int) -> memoryview:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return memoryview(mmap.mmap(descriptor, max(1, size)))[:size]
    finally:
        os.close(descriptor)
