"""Pulls one announced version from its publisher into the staging folder: manifest, missing chunks, checksums.

A version counts once every tensor's checksum matches. When one does not, every chunk that came is hashed, and those
that are not what the manifest says are asked for again, MAX_FALSE_ROUNDS times. What came before an interruption stays.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from polyrl.errors import ProtocolError
from polyrl.keys import AgentKeys
from polyrl.weights import VersionManifest, WeightsRef, decode_manifest, missing_chunks
from polyrl.wire.sealing import Handshake, LastingKeys
from polyrl_rollout.weights.staging import Staged, Staging
from polyrl_rollout.weights.stream import WeightStream
from polyrl_rollout.weights.transfer import PullFailed, Transfer

SILENCE_SECONDS: Final = 5.0
"""A connection on which nothing comes for so long is made anew."""
PROGRESS_SECONDS: Final = 60.0
"""Without one chunk for this long the publisher is taken for gone: chunks of 4 MiB at 70 kB/s."""
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


class Puller:
    """Pulls versions into one staging folder, one at a time."""

    def __init__(
        self,
        keys: AgentKeys,
        staging: Staging,
        silence_s: float = SILENCE_SECONDS,
        progress_s: float = PROGRESS_SECONDS,
        handshake: Callable[[LastingKeys], Handshake] = Handshake,
    ) -> None:
        self._keys, self._staging, self._handshake = keys, staging, handshake
        self._silence_s, self._progress_s = silence_s, progress_s
        self._lasting = LastingKeys.of(keys.secret_key, keys.public_key, keys.trainer_public_key)

    async def pull(self, weights: WeightsRef, served: Staged | None) -> Pulled:
        """The announced version, verified, on this machine. Chunks that `served` has are copied from it.

        May be cancelled at any await. Raises PullFailed.
        """
        if weights.public_key != self._keys.trainer_public_key:
            raise PullFailed(f"version {weights.version} is announced under a key that is not the trainer's")
        begun = asyncio.get_running_loop().time()

        def dial(check: Callable[[], None]) -> WeightStream:
            return WeightStream(weights.endpoint, self._handshake(self._lasting), self._silence_s, check)

        transfer = Transfer(weights, dial, silence_s=self._silence_s, progress_s=self._progress_s)
        pulling = asyncio.create_task(asyncio.to_thread(self._pull, weights, served, transfer))
        try:
            staged = await asyncio.shield(pulling)
        except asyncio.CancelledError:
            transfer.stop()
            # The staging folder is one thread's at a time; every wait of this one ends now.
            with contextlib.suppress(PullFailed):
                await pulling
            raise
        return Pulled(staged, asyncio.get_running_loop().time() - begun, bytes_pulled=transfer.bytes)

    def _pull(self, weights: WeightsRef, served: Staged | None, transfer: Transfer) -> Staged:
        try:
            manifest = decode_manifest(bytes(transfer.manifest()), weights.manifest_hash)
            return self._assemble(manifest, served, transfer)
        except OSError as error:
            raise PullFailed(f"version {weights.version} cannot be staged: {error.strerror or error}") from error
        except ProtocolError as error:
            self._staging.discard()
            raise PullFailed(f"version {weights.version} is not what was announced: {error}") from error

    def _assemble(self, manifest: VersionManifest, served: Staged | None, transfer: Transfer) -> Staged:
        partial = self._staging.open(manifest)
        if served is not None:
            partial.reuse(served)
        for times in range(MAX_FALSE_ROUNDS):
            transfer.chunks(missing_chunks(manifest, partial.have), partial)
            try:
                partial.verify()
                break
            except ProtocolError:
                false = partial.drop_false()
                log.warning("chunks are not what their hashes say", version=manifest.version, chunks=false)
                if not false or times + 1 == MAX_FALSE_ROUNDS:
                    raise
        return self._staging.finish(partial)
