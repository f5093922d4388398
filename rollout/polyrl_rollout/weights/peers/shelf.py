"""What this agent can give to others: of versions that arrive here what has come, of the served one all it rests on.

The served version of a chain is its anchor with deltas applied, in one file. A chunk of the anchor is made of it by
undoing the deltas on a copy of that part, newest first; so a joiner gets anchor and deltas from any agent, and no third
file of weights is kept. Whatever is given is hashed before: an agent does not lie by accident.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf
from typing import Final, Protocol

import numpy as np

from polyrl.weights import ChunkEntry, VersionManifest, chunk_places, digest, encode_manifest, manifest_hash, pieces
from polyrl.weights.deltas import PART_BYTES, parts_of, undo_part
from polyrl.wire import FromPeer, GetChunk, GetHeld, GetManifest, ServeOffer
from polyrl.wire.inventory import Inventory, encode_inventory
from polyrl.wire.serving import Content
from polyrl_rollout.weights.delta_bytes import DeltaBytes
from polyrl_rollout.weights.staging import Staged

KEPT_SHARE: Final = 0.5
"""Share of a version's bytes that the deltas below it may take in memory: as many as a chain may have."""
COSTLY_S: Final = 1e-3
"""An inventory that takes longer to make, of some ten thousand chunks, is given for LISTED times as long."""
LISTED: Final = 20


class Readable(Protocol):
    """Where chunks arrive: `staging.Partial`, `delta_bytes.DeltaBytes`."""

    have: set[bytes]

    def read(self, chunk: ChunkEntry) -> bytearray | None: ...


@dataclass(eq=False)
class _Shelved:
    """A version of which something can be given."""

    manifest: VersionManifest
    body: bytes
    chunks: dict[bytes, ChunkEntry]
    has: Callable[[bytes], bool]
    read: Callable[[ChunkEntry], bytearray | None]
    fetches: bool
    coming: set[bytes] = field(default_factory=set)
    hashed: set[bytes] = field(default_factory=set)
    """Chunks that were found to be what they should be."""
    listed: tuple[float, bytes] = (-inf, b"")
    """Until when which inventory is given."""


class Shelf:
    """Filled by the puller, read by whoever serves: any thread."""

    def __init__(self) -> None:
        self._entries: dict[bytes, _Shelved] = {}
        self._chain: list[DeltaBytes] = []
        """Newest first, down to the anchor that the served version comes from."""
        self._anchor: VersionManifest | None = None
        self._lock = threading.Lock()

    def arrives(self, manifest: VersionManifest, into: Readable, coming: set[bytes]) -> None:
        """Chunks of this version come into `into`; `coming` are those that the publisher was asked for."""
        entry = _entry(manifest, has=into.have.__contains__, read=into.read, fetches=True)
        entry.coming = coming
        with self._lock:
            # Replaced whole: servers look things up without waiting for anybody.
            self._entries = {**self._entries, manifest_hash(entry.body): entry}

    def settle(self, staged: Staged, chain: Sequence[VersionManifest], deltas: Sequence[DeltaBytes]) -> None:
        """A version is whole: made of `chain`, newest first, whose deltas are `deltas`. What it does not rest on is
        given no more."""
        with self._lock:
            if chain[-1].base is None:
                self._chain, self._anchor = list(deltas), chain[-1]
            elif self._chain_hash() == chain[-1].base_hash:
                self._chain = [*deltas, *self._chain]
            else:
                self._chain, self._anchor = list(deltas), None
            kept = _within(self._chain, int(KEPT_SHARE * staged.manifest.stream_bytes))
            if len(kept) < len(self._chain):
                self._chain, self._anchor = kept, None
            entries = [_entry(d.manifest, has=d.have.__contains__, read=d.read) for d in self._chain]
            if self._anchor is not None:
                entries.append(_anchor_entry(self._anchor, staged, self._chain))
            self._entries = {manifest_hash(entry.body): entry for entry in entries}

    def settle_found(self, staged: Staged, chain: Sequence[VersionManifest]) -> None:
        """As `settle`, of a version that another agent of this machine made: its deltas are there, not here."""
        if len(chain) == 1 and chain[0].base is None:
            self.settle(staged, chain, ())
            return
        with self._lock:
            self._chain, self._anchor, self._entries = [], None, {}

    def find(self, request: FromPeer) -> Content | None:
        """What answers a request of another agent."""
        if isinstance(request, GetHeld):
            entry = self._entries.get(request.manifest_hash)
            return None if entry is None else _content(_listed(entry))
        if isinstance(request, ServeOffer):
            return None
        for entry in self._entries.values():
            if entry.manifest.version == request.version:
                found = entry.body if isinstance(request, GetManifest) else _verified(entry, request)
                return None if found is None else _content(found)
        return None

    def _chain_hash(self) -> bytes:
        newest = self._chain[0].manifest if self._chain else self._anchor
        return b"" if newest is None else manifest_hash(encode_manifest(newest))


def _within(chain: Sequence[DeltaBytes], most: int) -> list[DeltaBytes]:
    kept: list[DeltaBytes] = []
    for delta in chain:
        most -= len(delta.data)
        if most < 0:
            break
        kept.append(delta)
    return kept


def _entry(
    manifest: VersionManifest,
    *,
    has: Callable[[bytes], bool],
    read: Callable[[ChunkEntry], bytearray | None],
    fetches: bool = False,
) -> _Shelved:
    chunks = {chunk.hash: chunk for chunk in manifest.chunks}
    return _Shelved(manifest, encode_manifest(manifest), chunks=chunks, has=has, read=read, fetches=fetches)


def _anchor_entry(anchor: VersionManifest, staged: Staged, chain: Sequence[DeltaBytes]) -> _Shelved:
    places, file, life = chunk_places(anchor), staged.file, staged.file.life
    stream, parts = file.stream(staged.manifest), [list(parts_of(delta.data)) for delta in chain]
    # Of a stream of odd length the last byte is not changed by differences, so it cannot be changed back.
    odd = anchor.chunks[-1].hash if chain and len(stream) % 2 else None

    def read(chunk: ChunkEntry) -> bytearray | None:
        offset, size = places[chunk.hash][0]
        first = offset // PART_BYTES
        begin, end = first * PART_BYTES, -(-(offset + size) // PART_BYTES) * PART_BYTES
        copied = file.copy(life, stream[begin:end])
        if copied is None:
            return None
        for delta in parts:
            for part, piece in zip(delta[first:], pieces(copied, PART_BYTES), strict=False):
                undo_part(part, piece)
        return copied[offset - begin : offset - begin + size] if len(copied) > size else copied

    return _entry(anchor, has=lambda hash_: hash_ != odd and file.life == life, read=read)


def _inventory(entry: _Shelved) -> Inventory:
    chunks = entry.manifest.chunks
    held = np.fromiter((entry.has(chunk.hash) for chunk in chunks), np.bool_, len(chunks))
    coming = np.fromiter((chunk.hash in entry.coming for chunk in chunks), np.bool_, len(chunks))
    return Inventory(held, coming, fetches=entry.fetches and not held.all())


def _listed(entry: _Shelved) -> bytes:
    begun = time.monotonic()
    until, listed = entry.listed
    if begun >= until:
        listed = encode_inventory(_inventory(entry))
        took = time.monotonic() - begun
        entry.listed = begun + (LISTED * took if took > COSTLY_S else 0.0), listed
    return listed


def _verified(entry: _Shelved, request: GetChunk) -> bytearray | None:
    chunk = entry.chunks.get(request.hash)
    data = None if chunk is None else entry.read(chunk)
    if chunk is None or data is None:
        return None
    if chunk.hash not in entry.hashed:
        if digest(data) != chunk.hash:
            return None
        entry.hashed.add(chunk.hash)
    return data


def _content(data: bytes | bytearray) -> Content:
    return Content(memoryview(data), nullcontext)
