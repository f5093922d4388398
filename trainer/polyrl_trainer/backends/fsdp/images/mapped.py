"""The leader's images in the memory of another rank on its machine, each mapped once.

A map's pages cost a fault each when they are first written, about as much as their copying, and images are used again.
What the leader has no more use for it empties, so that a map which stays holds no memory.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

MAX_MAPPED: Final = 16
"""More images than a publisher has in use at once."""


class MappedImages:
    """Of one rank."""

    def __init__(self) -> None:
        self._mapped: dict[str, memoryview] = {}

    def find(self, path: str, name: str, size: int) -> memoryview | None:
        """uint8[size], or None on another machine than the leader's. Raises OSError where it cannot be mapped."""
        if name not in self._mapped:
            if not _is_there(path, name):
                return None
            while len(self._mapped) >= MAX_MAPPED:
                del self._mapped[next(iter(self._mapped))]
            self._mapped[name] = _map(path, size)
        return self._mapped[name]


def _is_there(path: str, name: str) -> bool:
    """On another machine the path may be of anything, which is not opened to find that out."""
    try:
        return os.readlink(path) == f"/memfd:{name} (deleted)"
    except OSError:
        return False


def _map(path: str, size: int) -> memoryview:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return memoryview(mmap.mmap(descriptor, max(1, size)))[:size]
    finally:
        os.close(descriptor)
