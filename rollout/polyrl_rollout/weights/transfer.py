"""Gets chunks from the publisher over several connections at once, each with a thread of its own; others give some.

Each connection has CHUNKS_AHEAD requests under way. One on which nothing comes is made anew, and what it asked for and
did not get whoever is free asks for, until nothing has come on any for `progress_s`. Nobody asks for what another one
waits for: a chunk has one writer. Who is asked for what is planned by `polyrl.weights.fetch_plan`.

A publisher of several machines is connected to at each of them; manifests come from the first. One that was not
reached, too slow or gave a false chunk is left alone for LEFT_S, also by what is pulled next.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import structlog

from polyrl import wire
from polyrl.errors import PolyRLError, ProtocolError
from polyrl.weights import ChunkEntry, VersionManifest, WeightsRef
from polyrl.weights.fetch_plan import PUBLISHER, Source
from polyrl_rollout.weights.download import Download, Incoming
from polyrl_rollout.weights.peers.streams import PeerStreams, manifest_of_peers
from polyrl_rollout.weights.peers.swarm import Swarm
from polyrl_rollout.weights.stream import WeightStream, manifest_room

STREAMS: Final = 4
"""To each machine. One core receives and opens some 2 GB/s, and a connection over 50 ms of distance a tenth of a fast
link."""
CHUNKS_AHEAD: Final = 2
"""Requests under way on each connection: the next chunk is on its way while one arrives."""
RECONNECT_S: Final = 0.25
"""Pause before a connection is made again."""
ASK_ANYWAY_S: Final = 0.1
"""Between two looks whether the publisher is to be asked for something after all: others may be late."""
LEFT_S: Final = 60.0
"""As long as a pull goes on without a chunk; a machine that is back brings its share of the bandwidth again."""

log = structlog.get_logger(__name__)


class PullFailed(PolyRLError):
    """The version cannot be had now; the message says why."""


class CannotStage(PullFailed):
    """For a reason of this machine: it has no room for it, say."""


class Transfer:
    """Requests and answers about one version, and those that it rests on.

    `stop` may be called by any thread; all else by one."""

    def __init__(
        self,
        weights: WeightsRef,
        dial: Callable[[str, Callable[[], None]], WeightStream],
        silence_s: float,
        progress_s: float,
        streams: int = STREAMS,
        swarm: Swarm | None = None,
        left: dict[str, float] | None = None,
    ) -> None:
        """`dial` makes a connection to an endpoint, with what it is to call while it waits. `swarm`: other agents that
        are asked first. `left`: endpoints of machines that are not asked, and until when, as pulls before learned; it
        is kept up to date."""
        self._weights, self._dial, self._streams, self._swarm = weights, dial, streams, swarm
        self._endpoints = (weights.endpoint, *weights.others)
        self._silence_s, self._progress_s = silence_s, progress_s
        self._left = {} if left is None else left
        self._last: Download | None = None
        self._progress_at = time.monotonic()
        self._changed = threading.Condition()
        self._stopped = False
        self._open: set[WeightStream] = set()
        self._failure: PolyRLError | None = None
        self.bytes = self.bytes_from_peers = 0
        """Bytes of chunks that came; and of those that came from other agents."""

    def stop(self) -> None:
        """Has every method end soon, with PullFailed."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            for stream in self._open:
                stream.close()

    def begin(self) -> None:
        """Chunks are asked for from now on: what was waited for until now was not the publisher."""
        self._progress_at = time.monotonic()

    def pause(self, seconds: float) -> None:
        """Raises PullFailed once it is given up, and then at once."""
        with self._changed:
            if self._changed.wait_for(lambda: self._stopped, seconds):
                self._check()

    def manifest(self, version: int, expected: bytes) -> memoryview:
        """Its bytes, by their hash or not. Raises PullFailed when the publisher is silent or no longer has it,
        ProtocolError when it is a false one."""
        found: list[memoryview] = []

        def place(size: int) -> memoryview:
            found.append(manifest_room(size))
            return found[-1]

        def get(stream: WeightStream) -> None:
            if not stream.answer(stream.ask(wire.GetManifest(version)), place):
                raise self._no_longer_kept(version)

        def of_peers() -> bool:
            given = self._swarm and manifest_of_peers(self._swarm, version, expected, self._check)
            found.extend([given] if given else [])
            return bool(given)

        self._repeat(get, self._check, instead=of_peers)
        return found[-1]

    def chunks(self, manifest: VersionManifest, missing: Sequence[ChunkEntry], into: Incoming) -> None:
        """Gets all of `missing` into `into`, in any order. Raises as `manifest` does, and OSError."""
        if not missing:
            return
        swarm = self._swarm
        me, machines = swarm.engine if swarm else "", len(self._endpoints)
        if self._last is not None and self._last.manifest is manifest:
            self._leave(self._last.given_by(missing))  # they came, and are missing again: they were false
        left = [machine for machine, one in enumerate(self._endpoints) if self._left.get(one, 0.0) > time.monotonic()]
        download = self._last = Download(manifest, missing, into, self._took, me, machines, left)
        pays = swarm is not None and swarm.pays(sum(chunk.size for chunk in missing))
        others = PeerStreams(swarm, download, self._check) if swarm and pays else None
        threads = [
            threading.Thread(target=self._run, args=(download, machine), name="weight-stream", daemon=True)
            # The first one may come to be asked for all.
            for machine, most in (Counter(download.machines) | Counter({PUBLISHER: len(missing)})).items()
            for _ in range(min(self._streams, most))
        ]
        if swarm is not None:
            swarm.shelf.arrives(manifest, into, download.coming)
        if others is not None:
            others.start()
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not download.wait_for_all(ASK_ANYWAY_S):
            pass
        self._leave(download.left())
        # One that still dials has nothing to do any more. All else is over first: what came is changed by deltas next.
        with self._changed:
            self._changed.wait_for(lambda: not self._open)
        if others is not None:
            others.end()
        if self._failure is not None:
            raise self._failure

    def _leave(self, machines: Iterable[int]) -> None:
        for machine in {*machines} - {PUBLISHER}:
            log.info("weights: a machine of the publisher is left alone", endpoint=self._endpoints[machine])
            self._left[self._endpoints[machine]] = time.monotonic() + LEFT_S

    def _took(self, source: Source, size: int) -> None:
        self._progress_at = time.monotonic()
        self.bytes += size
        self.bytes_from_peers += size if isinstance(source, str) else 0

    def _run(self, download: Download, machine: int) -> None:
        waiting = deque[tuple[int, bytes]]()
        """What this connection was asked for, oldest first."""

        def check() -> None:
            self._check()
            if waiting and download.is_slow(machine, waiting[0][0]):
                raise TimeoutError("others give it sooner")

        def fetch(stream: WeightStream) -> None:
            if machine == PUBLISHER:
                self._fetch(stream, download, machine, waiting)
                return
            download.reach(machine)
            try:
                self._fetch(stream, download, machine, waiting)
            finally:
                download.lose(machine)

        try:
            self._repeat(fetch, check, until=download, endpoint=self._endpoints[machine])
        except PolyRLError as error:
            with self._changed:
                self._failure = self._failure or error
            self.stop()

    def _repeat(
        self,
        work: Callable[[WeightStream], None],
        check: Callable[[], None],
        instead: Callable[[], bool] = lambda: False,
        until: Download | None = None,
        endpoint: str = "",
    ) -> None:
        """Does `work` on one connection after the other, to the first machine without an `endpoint`, until it ends
        well, or what is done `instead` after a failure does, or all of the download `until` came from elsewhere."""
        while not (until and until.is_done):
            try:
                with self._dial(endpoint or self._weights.endpoint, check) as stream:
                    with self._changed:
                        self._open.add(stream)
                    try:
                        self._check()
                        work(stream)
                    finally:
                        with self._changed:
                            self._open.discard(stream)
                            self._changed.notify_all()
                    return
            except OSError as error:
                log.debug("weights: connection lost", endpoint=endpoint or self._weights.endpoint, error=str(error))
                if instead():
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped, RECONNECT_S)
                self._check()

    def _fetch(self, stream: WeightStream, download: Download, machine: int, waiting: deque[tuple[int, bytes]]) -> None:
        """Until all has come, or that machine turns out not to keep the version, which ends it on the first alone."""
        try:
            while not download.is_done:
                while len(waiting) < CHUNKS_AHEAD and (chunk := download.next(machine)) is not None:
                    waiting.append((chunk, b""))  # first: to ask may fail, and it is still to be had
                    request = wire.GetChunk(download.manifest.version, download.plan.chunks[chunk].hash)
                    waiting[-1] = (chunk, stream.ask(request))
                if not waiting:
                    self._check()
                    download.wait(ASK_ANYWAY_S)
                    continue
                if not self._receive(stream, download, machine, *waiting[0]):
                    download.refuse(machine)
                    return
                waiting.popleft()
        finally:
            download.give_back(machine, [chunk for chunk, _ in waiting])
            waiting.clear()

    def _receive(self, stream: WeightStream, download: Download, machine: int, chunk: int, about: bytes) -> bool:
        def place(size: int) -> memoryview:
            found = download.place(chunk, size)
            if found is None:
                raise ProtocolError(f"a chunk of {download.plan.chunks[chunk].size} bytes came as {size}")
            return found

        given = stream.answer(about, place)
        if given:
            download.take(machine, chunk)
        elif machine == PUBLISHER:
            self._left.clear()  # it may not reach the machine itself
            raise self._no_longer_kept(download.manifest.version)
        return given

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
