"""Pulls one announced version from its publisher into the staging folder: manifests, missing chunks, checksums.

A delta is applied to a copy of what it rests on: the version that is served, where that is in its chain, else the
chain's anchor. The served version stays whole. Where the result is not what the manifest says, all is pulled again from
the anchor on.

Of the agents of one machine one fetches a version, and the others take what it put together (`staging`); when it dies
or gives up, another one goes on with what has come.

A version counts once every tensor's checksum matches. When one does not, every chunk that came is hashed, and those
that are not what the manifest says are asked for again, MAX_FALSE_ROUNDS times. What came before an interruption stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import structlog

from polyrl.errors import ProtocolError
from polyrl.keys import AgentKeys
from polyrl.weights import (
    FIRST_EPOCH,
    FileEntry,
    VersionManifest,
    WeightsRef,
    decode_manifest,
    encode_manifest,
    manifest_hash,
    missing_chunks,
)
from polyrl.wire.sealing import Handshake, LastingKeys
from polyrl_rollout.weights.delta_bytes import DeltaBytes
from polyrl_rollout.weights.download import Incoming
from polyrl_rollout.weights.lent import LentStream, LoanReader
from polyrl_rollout.weights.peers.swarm import Swarm
from polyrl_rollout.weights.shared_folder import FROZEN_S
from polyrl_rollout.weights.staging import Staged, Staging
from polyrl_rollout.weights.stream import WeightStream
from polyrl_rollout.weights.transfer import CannotStage, PullFailed, Transfer

SILENCE_SECONDS: Final = 5.0
"""A connection on which nothing comes for so long is made anew."""
PROGRESS_SECONDS: Final = 60.0
"""Without one chunk for this long the publisher is taken for gone: chunks of 4 MiB at 70 kB/s."""
TURN_POLL_S: Final = 0.05
"""Between two looks at what another agent of this machine puts together; locks of files tell nobody."""
MAX_FALSE_ROUNDS: Final = 3
"""Times that false chunks are asked for before the version is dropped."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Pulled:
    """A version that may be served, and what getting it took."""

    staged: Staged
    seconds: float
    bytes_pulled: int
    """Bytes of chunks that came over the network."""
    bytes_from_peers: int
    """Bytes of those chunks that came from other agents."""
    liars: tuple[str, ...]
    """Other agents that gave a false chunk."""


class Puller:
    """Pulls versions into one staging folder, one at a time."""

    def __init__(
        self,
        keys: AgentKeys,
        staging: Staging,
        silence_s: float = SILENCE_SECONDS,
        progress_s: float = PROGRESS_SECONDS,
        handshake: Callable[[LastingKeys], Handshake] = Handshake,
        swarm: Swarm | None = None,
        reader: LoanReader | None = None,
        run_epoch: int = FIRST_EPOCH,
    ) -> None:
        """`swarm`: others that chunks are taken from, and given to; None: the publisher alone. `reader`: fetches what
        the publisher lends. `run_epoch`: versions of another start of the run are refused."""
        self._keys, self._staging, self._handshake, self._swarm = keys, staging, handshake, swarm
        self._reader, self._run_epoch = reader, run_epoch
        self._silence_s, self._progress_s = silence_s, progress_s
        self._transfer: Transfer | None = None
        self._left: dict[str, float] = {}
        """See `Transfer`."""
        self._deltas: dict[bytes, DeltaBytes] = {}
        """What has come of deltas, by the hash of their manifests, until a version is whole."""
        self._lasting = LastingKeys.of(keys.secret_key, keys.public_key, keys.trainer_public_key)

    @property
    def bytes_come(self) -> int:
        """Bytes that the newest pull has brought so far."""
        return self._transfer.bytes if self._transfer is not None else 0

    async def pull(self, weights: WeightsRef, served: Staged | None) -> Pulled:
        """The announced version, verified, on this machine. Chunks that `served` has are copied from it.

        May be cancelled at any await. Raises PullFailed.
        """
        if weights.public_key != self._keys.trainer_public_key:
            raise PullFailed(f"version {weights.version} is announced under a key that is not the trainer's")
        begun = asyncio.get_running_loop().time()

        def dial(endpoint: str, check: Callable[[], None]) -> WeightStream:
            shown = self._handshake(self._lasting)
            if self._reader is None:
                return WeightStream(endpoint, shown, self._silence_s, check)
            return LentStream(endpoint, shown, self._silence_s, check, self._reader)

        transfer = Transfer(
            weights, dial, silence_s=self._silence_s, progress_s=self._progress_s, swarm=self._swarm, left=self._left
        )
        self._transfer = transfer
        pulling = asyncio.create_task(asyncio.to_thread(self._pull, weights, served, transfer))
        try:
            staged = await asyncio.shield(pulling)
        except asyncio.CancelledError:
            transfer.stop()
            # The staging folder is one thread's at a time; every wait of this one ends now.
            with contextlib.suppress(PullFailed):
                await pulling
            raise
        seconds = asyncio.get_running_loop().time() - begun
        return Pulled(
            staged,
            seconds,
            bytes_pulled=transfer.bytes,
            bytes_from_peers=transfer.bytes_from_peers,
            liars=self._swarm.take_liars() if self._swarm else (),
        )

    def _pull(self, weights: WeightsRef, served: Staged | None, transfer: Transfer) -> Staged:
        try:
            try:
                return self._whole(self._chain(weights, served, transfer), served, transfer)
            except ProtocolError as error:
                if served is None:
                    raise
                log.warning("pulled again, without the served version", version=weights.version, error=str(error))
                self._deltas.clear()
                return self._whole(self._chain(weights, None, transfer), None, transfer)
        except OSError as error:
            raise CannotStage(f"version {weights.version} cannot be staged: {error.strerror or error}") from error
        except ProtocolError as error:
            self._deltas.clear()
            raise PullFailed(f"version {weights.version} is not what was announced: {error}") from error

    def _whole(self, chain: list[VersionManifest], served: Staged | None, transfer: Transfer) -> Staged:
        """The newest of `chain`: what another agent of this machine made of it, or made here when it is its turn."""
        files = served.files if served is not None and chain[-1].base is not None else chain[-1].files
        sign, since = self._staging.turn.sign_of_life(), time.monotonic()
        while True:
            mine = self._staging.turn.take_turn()
            try:
                found = self._found(chain, files)
                if found is not None:
                    return found
                if mine:
                    transfer.begin()
                    return self._assemble(chain, served, transfer)
            finally:
                if mine:
                    self._staging.give_back_turn()
            transfer.pause(TURN_POLL_S)
            if (now := self._staging.turn.sign_of_life()) != sign:
                sign, since = now, time.monotonic()
            elif time.monotonic() - since > FROZEN_S:
                log.warning("whoever fetches weights on this machine is frozen", folder=str(self._staging.root))
                self._staging.leave()

    def _found(self, chain: list[VersionManifest], files: tuple[FileEntry, ...]) -> Staged | None:
        with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="weight-check") as threads:
            found = self._staging.find(chain[0], files, threads.map)
        if found is not None:
            self._deltas.clear()
            if self._swarm is not None:
                self._swarm.shelf.settle_found(found, chain)
        return found

    def _chain(self, weights: WeightsRef, served: Staged | None, transfer: Transfer) -> list[VersionManifest]:
        """The announced version and what it rests on, newest first: down to an anchor, or to a delta on `served`."""
        held = manifest_hash(encode_manifest(served.manifest)) if served is not None else None
        chain = [self._manifest(weights.version, weights.manifest_hash, transfer)]
        while (last := chain[-1]).base is not None and last.base_hash != held:
            chain.append(self._manifest(last.base, last.base_hash, transfer))
        return chain

    def _manifest(self, version: int, expected: bytes, transfer: Transfer) -> VersionManifest:
        manifest = decode_manifest(bytes(transfer.manifest(version, expected)), expected, run_epoch=self._run_epoch)
        if manifest.version != version:
            raise ProtocolError(f"version {version} calls itself {manifest.version}")
        return manifest

    def _assemble(self, chain: list[VersionManifest], served: Staged | None, transfer: Transfer) -> Staged:
        deltas = [manifest for manifest in reversed(chain) if manifest.base is not None]
        wanted = {manifest_hash(encode_manifest(manifest)): manifest for manifest in deltas}
        # Of chains that were superseded on the way nothing will be asked any more.
        self._deltas = {hash_: known for hash_, known in self._deltas.items() if hash_ in wanted}
        for hash_, manifest in wanted.items():
            self._get(manifest, self._deltas.setdefault(hash_, DeltaBytes(manifest)), transfer)
        if len(deltas) < len(chain):
            partial = self._staging.open(chain[-1])
            if served is not None:
                partial.reuse(served)
            self._get(chain[-1], partial, transfer)
        else:
            assert served is not None, "a chain ends in an anchor, or in what is served"
            partial = self._staging.copy_of(served)
        with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="weight-delta") as threads:
            for manifest in deltas:
                partial.apply(manifest, self._deltas[manifest_hash(encode_manifest(manifest))].data, threads.map)
            partial.verify(threads.map)
        came, self._deltas = [self._deltas[hash_] for hash_ in reversed(wanted)], {}
        staged = self._staging.finish(partial)
        if self._swarm is not None:
            self._swarm.shelf.settle(staged, chain, came)
        return staged

    def _get(self, manifest: VersionManifest, into: Incoming, transfer: Transfer) -> None:
        """All chunks of it, verified."""
        for times in range(MAX_FALSE_ROUNDS):
            transfer.chunks(manifest, missing_chunks(manifest, into.have), into)
            try:
                into.verify()
                return
            except ProtocolError:
                false = into.drop_false()
                log.warning("chunks are not what their hashes say", version=manifest.version, chunks=false)
                if not false or times + 1 == MAX_FALSE_ROUNDS:
                    raise
