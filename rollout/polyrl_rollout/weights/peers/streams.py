"""A thread for each agent that is asked for chunks: dials, learns what it has, asks, checks every chunk by its hash.

What an agent gives false ends its connection, and it is never asked again; one that is silent, slow, full or gone is
left for another, and asked again after a pause (`polyrl.weights.neighbours`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Final

import numpy as np
import structlog

from polyrl import wire
from polyrl.errors import PolyRLError, ProtocolError
from polyrl.weights import digest, manifest_hash
from polyrl.weights.neighbours import NEIGHBOURS
from polyrl.wire.inventory import Inventory, decode_inventory, inventory_bytes
from polyrl_rollout.weights.download import Download
from polyrl_rollout.weights.peers.swarm import Swarm
from polyrl_rollout.weights.stream import WeightStream, manifest_room

ASK_AGAIN_S: Final = 0.1
"""Between two questions what an agent has: half the time a chunk takes at 300 Mbit/s."""
CHOOSE_S: Final = 0.5
"""Between two looks whether there is anybody to dial."""
USELESS_S: Final = 1.0
"""An agent that has nothing to give, and fetches nothing, is left after so long: it may not have heard of the version
yet."""
MANIFEST_S: Final = 10.0
"""In which other agents are asked for a manifest, before the publisher is asked again: it may be back."""
MAX_MISSES: Final = 8
"""Chunks that an agent says it has and does not give: some it may have given up meanwhile."""

log = structlog.get_logger(__name__)


class _UselessError(OSError):
    """The other agent has nothing that is not here."""


class _LieError(OSError):
    """The other agent gave another chunk than it was asked for."""


class PeerStreams:
    """Fetches of others what a download lacks, from `start` to `end`."""

    def __init__(self, swarm: Swarm, download: Download, check: Callable[[], None]) -> None:
        """`check` raises once the pull is given up."""
        self._swarm, self._download, self._check = swarm, download, check
        self._dialled = set[str]()
        self._streams = set[WeightStream]()
        self._over = False
        self._lock = threading.Condition()

    def start(self) -> None:
        self._expect()
        for _ in range(NEIGHBOURS):
            threading.Thread(target=self._run, name="peer-stream", daemon=True).start()

    def end(self) -> None:
        """Returns once nobody writes chunks any more; a dial that is under way ends by itself, and begins nothing."""
        with self._lock:
            self._over = True
            for stream in self._streams:
                stream.close()
            self._lock.wait_for(lambda: not self._streams)

    def _expect(self) -> None:
        with self._swarm.lock:
            expected = self._swarm.neighbours.expected()
        self._download.expect(expected)

    def _run(self) -> None:
        while not (self._over or self._download.is_done):
            with self._swarm.lock:
                name = self._swarm.neighbours.choose(time.monotonic(), self._dialled)
                if name is not None:
                    self._dialled.add(name)
            self._expect()
            if name is None:
                self._download.wait(CHOOSE_S)
                continue
            try:
                self._talk(name)
            finally:
                with self._swarm.lock:
                    self._dialled.discard(name)

    def _talk(self, name: str) -> None:
        neighbours = self._swarm.neighbours
        receiving: list[int] = []
        """The chunk that is awaited; empty: none."""
        try:
            with self._swarm.dial(name, lambda: self._check_pace(name, receiving)) as stream:
                with self._swarm.lock:
                    neighbours.reached(name)
                if self._begin(name, stream):
                    try:
                        self._exchange(name, stream, receiving)
                    finally:
                        self._download.leave(name)
                        with self._lock:
                            self._streams.discard(stream)
                            self._lock.notify_all()
        except (OSError, PolyRLError) as error:
            if not isinstance(error, OSError | ProtocolError):
                self._over = True  # the pull was given up
            if self._over or self._download.is_done:
                return
            log.debug("an agent gives no chunks", engine=name, error=str(error))
            with self._swarm.lock:
                if isinstance(error, _LieError):
                    neighbours.lied(name)
                    log.warning("an agent gave a false chunk, and is asked no more", engine=name)
                elif isinstance(error, _UselessError):
                    neighbours.had_nothing(name, time.monotonic())
                else:
                    neighbours.failed(name, time.monotonic())

    def _begin(self, name: str, stream: WeightStream) -> bool:
        with self._lock:
            if not self._over:
                self._streams.add(stream)
                self._download.join(name)
            return not self._over

    def _exchange(self, name: str, stream: WeightStream, receiving: list[int]) -> None:
        """Raises OSError or ProtocolError when it should be left."""
        download, pending = self._download, deque[tuple[int | None, bytes]]()
        polled_at, polls, useful_at, misses = -inf, False, time.monotonic(), 0
        while not download.is_done:
            self._check()
            if not polls and time.monotonic() - polled_at >= ASK_AGAIN_S:
                pending.append((None, stream.ask(wire.GetHeld(download.hash))))
                polls = True
            while (chunk := download.next(name)) is not None:
                entry = download.plan.chunks[chunk]
                pending.append((chunk, stream.ask(wire.GetChunk(download.manifest.version, entry.hash))))
            if not pending:
                download.wait(ASK_AGAIN_S)
                continue
            chunk, about = pending.popleft()
            if chunk is None:
                polls, polled_at = False, time.monotonic()
                if download.note(name, _inventory(stream, about, len(download.manifest.chunks))):
                    useful_at = polled_at
                elif polled_at - useful_at > USELESS_S:
                    raise _UselessError
                continue
            receiving[:] = [chunk]
            misses += not self._receive(name, stream, chunk, about)
            receiving.clear()
            if misses > MAX_MISSES:
                raise ProtocolError("it does not have what it says it has")

    def _receive(self, name: str, stream: WeightStream, chunk: int, about: bytes) -> bool:
        """False when it does not have the chunk."""
        download, places = self._download, list[memoryview]()

        def place(size: int) -> memoryview:
            found = download.place(chunk, size)
            if found is None:
                raise _LieError
            places.append(found)
            return found

        if not stream.answer(about, place):
            download.lacks(name, chunk)
            return False
        if digest(places[0]) != download.plan.chunks[chunk].hash:
            raise _LieError
        download.take(name, chunk)
        return True

    def _check_pace(self, name: str, receiving: list[int]) -> None:
        self._check()
        if receiving and self._download.is_slow(name, receiving[0]):
            raise TimeoutError("it is slower than others")


def _inventory(stream: WeightStream, about: bytes, chunks: int) -> Inventory:
    """None of it where it does not know the version. Raises OSError, ProtocolError."""
    found: list[memoryview] = []

    def place(size: int) -> memoryview:
        if size != inventory_bytes(chunks):
            raise ProtocolError(f"not an inventory of {chunks} chunks: {size} bytes")
        found.append(memoryview(bytearray(size)))
        return found[0]

    if not stream.answer(about, place):
        return Inventory(np.zeros(chunks, np.bool_), np.zeros(chunks, np.bool_), fetches=False)
    return decode_inventory(bytes(found[0]), chunks)


def manifest_of_peers(swarm: Swarm, version: int, expected: bytes, check: Callable[[], None]) -> memoryview | None:
    """The manifest of that hash from one of the agents, for when the publisher does not give it; None: none has it, or
    gives it in time. Those are asked last the next time."""
    asked, until = set[str](), time.monotonic() + MANIFEST_S

    def check_pace() -> None:
        check()
        if time.monotonic() > until:
            raise TimeoutError("it takes too long to give a manifest")

    while len(asked) < NEIGHBOURS and time.monotonic() < until:
        check()
        with swarm.lock:
            name = swarm.neighbours.choose(time.monotonic(), asked)
        if name is None:
            return None
        asked.add(name)
        try:
            with swarm.dial(name, check_pace) as stream:
                found: list[memoryview] = []

                def place(size: int, found: list[memoryview] = found) -> memoryview:
                    found.append(manifest_room(size))
                    return found[0]

                given = stream.answer(stream.ask(wire.GetManifest(version)), place)
            if given and manifest_hash(bytes(found[0])) == expected:
                return found[0]
            with swarm.lock:
                swarm.neighbours.had_nothing(name, time.monotonic())
        except (OSError, ProtocolError):
            with swarm.lock:
                swarm.neighbours.failed(name, time.monotonic())
    return None
