"""Where versions lie in the trainer's memory: an image each, whose pages are used again by a later version.

The first touch of a page costs three times what writing to it costs, and a model has many. An image that was given back
may be read by a server at that moment: whoever reads enters `reading`, which fails from then on.

An image is a file in memory: the ranks of a learner on this machine map it, and each writes its own rows.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from polyrl.errors import ProtocolError

MAX_SPARE: Final = 1
"""Images kept for later versions: one is written while the others are served."""


class Image:
    """The bytes of one version after the other."""

    def __init__(self, size: int) -> None:
        self.name = f"polyrl-weights-{secrets.token_hex(16)}"
        descriptor = os.memfd_create(self.name)
        # A map of nothing is refused.
        os.ftruncate(descriptor, max(1, size))
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        mapped = mmap.mmap(descriptor, max(1, size))
        # Once nobody here has a view of it. At exit the kernel does it: threads may still send from it then.
        weakref.finalize(mapped, _free, descriptor).atexit = False
        self.data = memoryview(mapped)[:size]
        """uint8[size]"""
        self._lock = threading.Condition()
        self._life = self._readers = 0

    def reading(self) -> Callable[[], AbstractContextManager[None]]:
        """What a reader of the version that lies here now enters; it raises ProtocolError once another one does."""
        life = self._life

        @contextmanager
        def enter() -> Iterator[None]:
            with self._lock:
                if life != self._life:
                    raise ProtocolError("the version is no longer kept")
                self._readers += 1
            try:
                yield
            finally:
                with self._lock:
                    self._readers -= 1
                    self._lock.notify_all()

        return enter

    def expire(self) -> None:
        """Returns once nobody reads what lies here, which takes as long as a frame's sealing."""
        with self._lock:
            self._life += 1
            self._lock.wait_for(lambda: not self._readers)


def _free(descriptor: int) -> None:
    # Ranks keep their maps: without this their pages would stay.
    os.ftruncate(descriptor, 0)
    os.close(descriptor)


class Images:
    """Makes images, and keeps those that were given back."""

    def __init__(self) -> None:
        self._spare: list[Image] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> Image:
        """One of `size` bytes, with whatever lies in it."""
        with self._lock:
            for image in self._spare:
                if len(image.data) == size:
                    self._spare.remove(image)
                    return image
            self._spare.clear()
        return Image(size)

    def give_back(self, image: Image) -> None:
        image.expire()
        with self._lock:
            self._spare = [image, *self._spare][:MAX_SPARE]
