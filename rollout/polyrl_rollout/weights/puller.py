"""Weight versions on the engine's side: pull what is announced while the old version serves, then switch.

Only the newest announcement counts: it cancels a pull that is under way, never a switch. A version that cannot be had
or loaded is answered WeightsFailed, and the old one serves on; the manager announces again. After MAX_WEIGHTS_FAILURES
in a row the engine is given up with the last reason: another machine may do better. While an engine serves, only loads
count: a publisher that is away is no fault of the engine.

Keeps OUTSTANDING requests under way, each with its own deadline, after which it is sent again. A chunk counts once its
hash matches; a version counts once every tensor's checksum matches. What was verified before an interruption is kept.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog
import zmq
import zmq.asyncio

from polyrl import wire
from polyrl.control import may_be_ipv6
from polyrl.errors import PolyRLError, ProtocolError
from polyrl.keys import AgentKeys
from polyrl.weights import ChunkEntry, VersionManifest, WeightsRef, chunk_matches, decode_manifest, missing_chunks
from polyrl_rollout.engines.port import NO_VERSION, EngineFailed, InferenceEngine
from polyrl_rollout.weights.staging import Partial, Staged, Staging

OUTSTANDING: Final = 4
"""Chunks requested and not yet here: 16 MiB, enough to fill a 10 Gbit/s link over 10 ms; half a publisher's queue."""
CHUNK_SECONDS: Final = 5.0
"""A chunk of 4 MiB that takes longer is requested again: below 1 MB/s a rollout cannot keep up anyway."""
PROGRESS_SECONDS: Final = 60.0
"""Without one valid chunk for this long the publisher is taken for gone."""
MAX_FALSE_CHUNKS: Final = 3
"""Chunks with a wrong hash before the publisher is given up."""
MAX_WEIGHTS_FAILURES: Final = 5
"""Versions in a row that could not be had or loaded: with the manager's pauses half a minute of failing loads, or five
of a silent publisher."""
RECEIPTS_KEPT: Final = 256
"""Versions of which an engine may still hold tokens, with room; 16 bytes each."""
RECONNECT_MS: Final = 100
RECONNECT_MAX_MS: Final = 2_000
T = TypeVar("T")
log = structlog.get_logger(__name__)


class PullFailed(PolyRLError):
    """The version cannot be had now; the message says why."""


@dataclass(frozen=True)
class Pulled:
    """A version that may be served, and what getting it took."""

    staged: Staged
    seconds: float
    bytes_pulled: int
    """Bytes of chunks that came over the network."""


class Puller:
    """Pulls versions into one staging folder, one at a time."""

    def __init__(
        self, keys: AgentKeys, staging: Staging, chunk_s: float = CHUNK_SECONDS, progress_s: float = PROGRESS_SECONDS
    ) -> None:
        self._keys, self._staging = keys, staging
        self._chunk_s, self._progress_s = chunk_s, progress_s

    async def pull(self, weights: WeightsRef, served: Staged | None) -> Pulled:
        """The announced version, verified, on this machine. Chunks that `served` has are copied from it.

        May be cancelled at any await. Raises PullFailed.
        """
        if weights.public_key != self._keys.trainer_public_key:
            raise PullFailed(f"version {weights.version} is announced under a key that is not the trainer's")
        begun = asyncio.get_running_loop().time()
        with zmq.asyncio.Context() as context, self._connect(context, weights) as socket:
            pull = _Pull(socket, weights, self._chunk_s, self._progress_s)
            try:
                manifest = await pull.manifest()
                staged = await self._assemble(pull, manifest, served)
            except OSError as error:
                raise PullFailed(f"version {weights.version} cannot be staged: {error.strerror or error}") from error
            except ProtocolError as error:
                self._staging.discard(weights.version)
                raise PullFailed(f"version {weights.version} is not what was announced: {error}") from error
        return Pulled(staged, asyncio.get_running_loop().time() - begun, bytes_pulled=pull.bytes)

    async def _assemble(self, pull: _Pull, manifest: VersionManifest, served: Staged | None) -> Staged:
        partial = await asyncio.to_thread(self._staging.open, manifest)
        try:
            have = await asyncio.to_thread(_already_here, partial, manifest, served)
            await pull.chunks(missing_chunks(manifest, have), partial)
            return await asyncio.to_thread(self._staging.finish, partial, manifest.version)
        finally:
            partial.close()

    def _connect(self, context: zmq.asyncio.Context, weights: WeightsRef) -> zmq.asyncio.Socket:
        socket = context.socket(zmq.DEALER)
        socket.curve_publickey = self._keys.public_key.encode()
        socket.curve_secretkey = self._keys.secret_key.encode()
        socket.curve_serverkey = weights.public_key.encode()
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        socket.ipv6 = may_be_ipv6(weights.endpoint)
        socket.connect(weights.endpoint)
        return socket


class Versions:
    """Which version this engine serves, and which it is getting."""

    def __init__(
        self,
        engine: InferenceEngine,
        puller: Puller,
        staging: Staging,
        switch: Callable[[Pulled], Awaitable[str]],
        send: Callable[[wire.FromAgent], None],
        give_up: Callable[[EngineFailed], None],
    ) -> None:
        """`switch` has the engine load a staged version and notifies the manager; it returns why the old one serves on,
        empty when the new one does. `give_up` ends the agent."""
        self._engine, self._puller, self._staging = engine, puller, staging
        self._switch, self._send, self._give_up = switch, send, give_up
        self._failures = 0
        self._wanted: WeightsRef | None = None
        self._changed = asyncio.Event()
        self._served: Staged | None = None
        self.receipts: dict[int, bytes] = {}
        """Of the versions that were pulled last, oldest first."""

    def announce(self, weights: WeightsRef) -> None:
        """A version exists; repeats are harmless."""
        if weights.version == self._engine.version:
            receipt = self.receipts.get(weights.version, b"")
            self._send(wire.WeightsLoaded(weights.version, 0.0, load_seconds=0.0, bytes_pulled=0, receipt=receipt))
        elif weights.version < self._engine.version:
            why = f"version {self._engine.version} is served, which is newer"
            self._send(wire.WeightsFailed(weights.version, self._engine.version, reason=why))
        elif weights != self._wanted:
            self._wanted = weights
            self._changed.set()

    async def run(self) -> None:
        """Gets one announced version after the other, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            weights = self._wanted
            if weights is None:
                continue
            pulled = await self._pull(weights)
            if pulled is not None:
                await self._serve(pulled)
            if self._wanted is weights and not self._changed.is_set():
                self._wanted = None

    async def _serve(self, pulled: Pulled) -> None:
        self.receipts[pulled.staged.version] = pulled.staged.receipt
        if len(self.receipts) > RECEIPTS_KEPT:
            del self.receipts[next(iter(self.receipts))]
        why = await self._switch(pulled)
        if why:
            self._count_failure(why)
            return
        self._failures, self._served = 0, pulled.staged
        self._staging.keep_only(pulled.staged.version)

    def _count_failure(self, why: str) -> None:
        self._failures += 1
        if self._failures >= MAX_WEIGHTS_FAILURES:
            self._give_up(EngineFailed(f"weights could not be loaded {self._failures} times in a row: {why}"))

    async def _pull(self, weights: WeightsRef) -> Pulled | None:
        """None when it failed, or a newer announcement came first."""
        pulling = asyncio.create_task(self._puller.pull(weights, self._served))
        newer = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({pulling, newer}, return_when=asyncio.FIRST_COMPLETED)
            if not pulling.done():
                log.info("pull superseded", version=weights.version)
                return None
            return await pulling
        except PullFailed as error:
            log.warning("weights not pulled", version=weights.version, error=str(error))
            self._send(wire.WeightsFailed(weights.version, self._engine.version, reason=str(error)))
            if self._engine.version == NO_VERSION:
                self._count_failure(str(error))
            return None
        finally:
            pulling.cancel()
            newer.cancel()
            await asyncio.gather(pulling, newer, return_exceptions=True)


class _Pull:
    """Requests and replies about one version."""

    def __init__(self, socket: zmq.asyncio.Socket, weights: WeightsRef, chunk_s: float, progress_s: float) -> None:
        self._socket, self._weights = socket, weights
        self._chunk_s, self._progress_s = chunk_s, progress_s
        self._loop = asyncio.get_running_loop()
        self._progress_at = self._loop.time()
        self._false = 0
        self.bytes = 0

    async def manifest(self) -> VersionManifest:
        """Raises PullFailed when the publisher is silent or no longer has it, ProtocolError when it is a false one."""
        while True:
            await self._ask(wire.GetManifest(self._weights.version))
            reply = await self._receive(self._loop.time() + self._chunk_s)
            if isinstance(reply, wire.ManifestReply) and reply.version == self._weights.version:
                if not reply.body:
                    raise PullFailed(f"version {self._weights.version} is no longer kept by its publisher")
                self._progress_at = self._loop.time()
                return decode_manifest(reply.body, self._weights.manifest_hash)

    async def chunks(self, missing: list[ChunkEntry], partial: Partial) -> None:
        """Gets all of `missing` into `partial`, in any order."""
        todo, wanted = deque(missing), {chunk.hash: chunk for chunk in missing}
        due: dict[bytes, float] = {}
        while wanted:
            while todo and len(due) < OUTSTANDING:
                chunk = todo.popleft()
                due[chunk.hash] = self._loop.time() + self._chunk_s
                await self._ask(wire.GetChunk(self._weights.version, chunk.hash))
            reply = await self._receive(min(due.values()))
            if isinstance(reply, wire.ChunkReply) and await self._take(reply, wanted, partial):
                due.pop(reply.hash, None)
                del wanted[reply.hash]
            for hash_ in [hash_ for hash_, at in due.items() if at <= self._loop.time()]:
                del due[hash_]
                todo.append(wanted[hash_])

    async def _take(self, reply: wire.ChunkReply, wanted: dict[bytes, ChunkEntry], partial: Partial) -> bool:
        chunk = wanted.get(reply.hash)
        if chunk is None:
            return False  # a late answer to a chunk that was requested twice
        if not reply.data:
            raise PullFailed(f"version {self._weights.version} is no longer kept by its publisher")
        if not await asyncio.to_thread(chunk_matches, chunk, reply.data):
            self._false += 1
            log.warning("a chunk does not have its hash", version=self._weights.version, times=self._false)
            if self._false >= MAX_FALSE_CHUNKS:
                raise ProtocolError(f"{self._false} chunks do not have their hash")
            return False
        await asyncio.to_thread(partial.write, chunk.hash, reply.data)
        self.bytes += chunk.size
        self._progress_at = self._loop.time()
        return True

    async def _ask(self, message: wire.FromPuller) -> None:
        await self._within(self._socket.send(wire.encode(message)), self._progress_at + self._progress_s)

    async def _receive(self, until: float) -> wire.ToPuller | None:
        """The next readable answer; None when there is none by `until`. Raises PullFailed without progress."""
        give_up = self._progress_at + self._progress_s
        if self._loop.time() >= give_up:
            raise PullFailed(
                f"the publisher at {self._weights.endpoint} gave nothing of version {self._weights.version}"
                f" for {self._progress_s:.0f} s"
            )
        frame = await self._within(self._socket.recv(), min(until, give_up))
        return None if frame is None else wire.decode_to_puller(frame)

    async def _within(self, wait: Awaitable[T], until: float) -> T | None:
        try:
            async with asyncio.timeout_at(until):
                return await wait
        except TimeoutError:
            return None


def _already_here(partial: Partial, manifest: VersionManifest, served: Staged | None) -> set[bytes]:
    have = partial.held()
    if served is not None:
        have |= partial.reuse(served, {chunk.hash for chunk in manifest.chunks} - have)
    return have
