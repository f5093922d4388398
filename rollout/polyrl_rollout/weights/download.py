"""Chunks of one version on their way from several sources at once: the plan, and where what comes is written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Protocol

import numpy as np

from polyrl.weights import ChunkEntry, TensorEntry, VersionManifest, encode_manifest, manifest_hash
from polyrl.weights.fetch_plan import PUBLISHER, FetchPlan, Source
from polyrl.weights.shares import chunk_machines
from polyrl.wire.inventory import Inventory


class Incoming(Protocol):
    """Where chunks go: `staging.Partial`, `delta_bytes.DeltaBytes`."""

    have: set[bytes]

    def place(self, chunk: ChunkEntry) -> memoryview: ...
    def read(self, chunk: ChunkEntry) -> bytearray | None: ...
    def take(self, chunk: ChunkEntry) -> list[TensorEntry]: ...
    def verify_tensor(self, tensor: TensorEntry) -> None: ...
    def verify(self) -> None: ...
    def drop_false(self) -> int: ...


class Download:
    """Shared by a thread per connection; a chunk goes by its place in `plan.chunks`, and has one writer at a time."""

    def __init__(
        self,
        manifest: VersionManifest,
        missing: Sequence[ChunkEntry],
        into: Incoming,
        took: Callable[[Source, int], None],
        me: str = "",
        machines: int = 1,
        left: Container[int] = (),
    ) -> None:
        """`took` is called with each chunk's source and size. `machines`: so many the publisher has, of which those
        that are `left` are not asked."""
        self.manifest, self.hash = manifest, manifest_hash(encode_manifest(manifest))
        self._into, self._took = into, took
        places = {chunk.hash: place for place, chunk in reversed(list(enumerate(manifest.chunks)))}
        self._places = np.array([places[chunk.hash] for chunk in missing], np.int64)
        owners = chunk_machines(manifest, machines)
        self.machines = [PUBLISHER if owners[place] in left else owners[place] for place in self._places]
        """By chunk: the machine of the publisher that is asked for it."""
        self._given_by: dict[bytes, int] = {}
        self.plan = FetchPlan(missing, me, time.monotonic(), self.machines)
        self.coming = set[bytes]()
        """Asked of the publisher, for others to know."""
        self.changed, self._whole = threading.Condition(), threading.Event()

    @property
    def is_done(self) -> bool:
        return self.plan.is_done

    def wait(self, seconds: float) -> None:
        """Until a chunk has come, or is to be had again, at most so long."""
        with self.changed:
            if not self.plan.is_done:
                self.changed.wait(seconds)

    def wait_for_all(self, seconds: float) -> bool:
        """Whether the last chunk has come, at most so long; who waits is not woken for each."""
        return self._whole.wait(seconds)

    def next(self, source: Source) -> int | None:
        with self.changed:
            chunk = self.plan.next(source, time.monotonic())
            if chunk is not None and isinstance(source, int):
                self.coming.add(self.plan.chunks[chunk].hash)
            return chunk

    def place(self, chunk: int, size: int) -> memoryview | None:
        """Where its bytes go; None when it is of another size."""
        entry = self.plan.chunks[chunk]
        return self._into.place(entry) if size == entry.size else None

    def take(self, source: Source, chunk: int) -> None:
        """The chunk lies in its place, and may be believed."""
        entry = self.plan.chunks[chunk]
        with self.changed:
            self.coming.discard(entry.hash)
            self._took(source, entry.size)
            if isinstance(source, int):
                self._given_by[entry.hash] = source
            whole = self._into.take(entry)
            self.plan.came(source, chunk, time.monotonic())
            if self.plan.is_done:
                self._whole.set()
            self.changed.notify_all()
        for tensor in whole:
            self._into.verify_tensor(tensor)

    def reach(self, machine: int) -> None:
        with self.changed:
            self.plan.reach(machine)

    def lose(self, machine: int) -> None:
        with self.changed:
            self.plan.lose(machine, time.monotonic())

    def left(self) -> list[int]:
        """See `FetchPlan`."""
        with self.changed:
            return self.plan.left(time.monotonic())

    def given_by(self, chunks: Iterable[ChunkEntry]) -> list[int]:
        """The publisher's machines that brought any of them."""
        with self.changed:
            return [self._given_by[chunk.hash] for chunk in chunks if chunk.hash in self._given_by]

    def refuse(self, machine: int) -> None:
        with self.changed:
            self.plan.refuse(machine)
            self.changed.notify_all()

    def give_back(self, machine: int, chunks: Iterable[int]) -> None:
        """Puts back chunks that were asked for on one of the publisher's connections."""
        with self.changed:
            given = list(chunks)
            self.plan.give_back(machine, given)
            self.coming.difference_update(self.plan.chunks[chunk].hash for chunk in given)
            self.changed.notify_all()

    def is_slow(self, source: Source, chunk: int) -> bool:
        with self.changed:
            return self.plan.is_slow(source, chunk, time.monotonic())

    def expect(self, others: Iterable[str]) -> None:
        with self.changed:
            self.plan.expect(others)

    def join(self, source: str) -> None:
        with self.changed:
            self.plan.join(source)

    def leave(self, source: str) -> None:
        with self.changed:
            self.plan.leave(source)
            self.changed.notify_all()

    def lacks(self, source: str, chunk: int) -> None:
        with self.changed:
            self.plan.lacks(source, chunk)
            self.changed.notify_all()

    def note(self, source: str, inventory: Inventory) -> bool:
        """Whether it is of use: it has something that is not here, or may get it."""
        with self.changed:
            held, coming = inventory.held[self._places], inventory.coming[self._places]
            self.plan.note(source, held, coming, time.monotonic(), fetches=inventory.fetches)
            self.changed.notify_all()
            return inventory.fetches or self.plan.wants_of(source)
