"""Gets chunks over several connections at once, each with a thread of its own.

Each connection has CHUNKS_AHEAD requests under way. One on which nothing comes is made anew, and what it asked for and
did not get whoever is free asks for, until nothing has come on any for `progress_s`. Nobody asks for what another one
waits for: a chunk has one writer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from polyrl import wire
from polyrl.errors import PolyRLError, ProtocolError
from polyrl.weights import ChunkEntry, TensorEntry, WeightsRef
from polyrl_rollout.weights.stream import WeightStream, manifest_room

STREAMS: Final = 4
"""One core receives and opens some 2 GB/s, and a connection over 50 ms of distance a tenth of a fast link."""
CHUNKS_AHEAD: Final = 2
"""Of each connection: the next chunk is on its way while one arrives."""
RECONNECT_S: Final = 0.25
"""Pause before a connection is made again."""

log = structlog.get_logger(__name__)


class PullFailed(PolyRLError):
    """The version cannot be had now; the message says why."""


class Incoming(Protocol):
    """Where chunks go: `staging.Partial`, `delta_bytes.DeltaBytes`."""

    have: set[bytes]

    def place(self, chunk: ChunkEntry) -> memoryview: ...
    def take(self, chunk: ChunkEntry) -> list[TensorEntry]: ...
    def verify_tensor(self, tensor: TensorEntry) -> None: ...
    def verify(self) -> None: ...
    def drop_false(self) -> int: ...


class Transfer:
    """Requests and answers about one version, and those that it rests on.

    `stop` may be called by any thread; all else by one."""

    def __init__(
        self,
        weights: WeightsRef,
        dial: Callable[[Callable[[], None]], WeightStream],
        silence_s: float,
        progress_s: float,
        streams: int = STREAMS,
    ) -> None:
        """`dial` makes a connection, with what it is to call while it waits."""
        self._weights, self._dial, self._streams = weights, dial, streams
        self._silence_s, self._progress_s = silence_s, progress_s
        self._progress_at = time.monotonic()
        self._changed = threading.Condition()
        self._stopped = False
        self._open: set[WeightStream] = set()
        self._todo: deque[ChunkEntry] = deque()
        self._failure: PolyRLError | None = None
        self.bytes = 0
        """Of chunks that came."""

    def stop(self) -> None:
        """Has every method end soon, with PullFailed."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            for stream in self._open:
                stream.close()

    def manifest(self, version: int) -> memoryview:
        """Raises PullFailed when the publisher is silent or no longer has it, ProtocolError when it is a false one."""
        found: list[memoryview] = []

        def place(size: int) -> memoryview:
            found.append(manifest_room(size))
            return found[-1]

        def get(stream: WeightStream) -> None:
            if not stream.answer(stream.ask(wire.GetManifest(version)), place):
                raise self._no_longer_kept(version)

        self._repeat(get)
        return found[-1]

    def chunks(self, version: int, missing: list[ChunkEntry], into: Incoming) -> None:
        """Gets all of `missing` into `into`, in any order. Raises as `manifest` does, and OSError."""
        self._todo = deque(missing)
        number = max(1, min(self._streams, len(missing)))
        threads = [
            threading.Thread(target=self._run, args=(version, into), name="weight-stream", daemon=True)
            for _ in range(number if missing else 0)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            # Each ends by itself: every wait of it has a deadline, and looks at the progress of all.
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self, version: int, into: Incoming) -> None:
        try:
            self._repeat(lambda stream: self._fetch(stream, version, into))
        except PolyRLError as error:
            with self._changed:
                self._failure = self._failure or error
            self.stop()

    def _repeat(self, work: Callable[[WeightStream], None]) -> None:
        """Does `work` on one connection after the other until it ends well."""
        while True:
            try:
                with self._dial(self._check) as stream:
                    with self._changed:
                        self._open.add(stream)
                    try:
                        self._check()
                        work(stream)
                    finally:
                        with self._changed:
                            self._open.discard(stream)
                    return
            except OSError as error:
                log.debug("weights: connection lost", endpoint=self._weights.endpoint, error=str(error))
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped, RECONNECT_S)
                self._check()

    def _fetch(self, stream: WeightStream, version: int, into: Incoming) -> None:
        taken, asked = deque[ChunkEntry](), deque[bytes]()
        try:
            while True:
                while len(taken) < CHUNKS_AHEAD and (chunk := self._next()) is not None:
                    taken.append(chunk)  # first: to ask may fail, and it is still to be had
                    asked.append(stream.ask(wire.GetChunk(version, chunk.hash)))
                if not taken:
                    return
                if not self._receive(stream, taken[0], asked.popleft(), into):
                    raise self._no_longer_kept(version)
                taken.popleft()
        finally:
            with self._changed:
                self._todo.extendleft(taken)

    def _receive(self, stream: WeightStream, chunk: ChunkEntry, about: bytes, into: Incoming) -> bool:
        def place(size: int) -> memoryview:
            if size != chunk.size:
                raise ProtocolError(f"a chunk of {chunk.size} bytes came as {size}")
            return into.place(chunk)

        if not stream.answer(about, place):
            return False
        with self._changed:
            self.bytes += chunk.size
            self._progress_at = time.monotonic()
            whole = into.take(chunk)
        for tensor in whole:
            into.verify_tensor(tensor)
        return True

    def _next(self) -> ChunkEntry | None:
        """What to ask for; None when nothing is left to ask for."""
        with self._changed:
            self._check()
            return self._todo.popleft() if self._todo else None

    def _check(self) -> None:
        if self._stopped:
            raise PullFailed(f"the pull of version {self._weights.version} was given up")
        if time.monotonic() - self._progress_at >= self._progress_s:
            raise PullFailed(
                f"the publisher at {self._weights.endpoint} gave nothing of version {self._weights.version}"
                f" for {self._progress_s:g} s"
            )

    def _no_longer_kept(self, version: int) -> PullFailed:
        needs = "" if version == self._weights.version else f", which version {self._weights.version} rests on,"
        return PullFailed(f"version {version}{needs} is no longer kept by its publisher")
