"""One machine's share of every version: the memory that it lies in, what is computed of it, chunks for receivers.

The learner's first machine has one within its `WeightPublisher`. Each further one has one in the process of its pod,
behind a server of its own: it computes on that machine's cores, beside what the ranks do, and knows of no manifest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from polyrl import weights
from polyrl.keys import TrainerKeys, read_keys
from polyrl.weights import TensorEntry
from polyrl.weights.deltas import PART_BYTES, EachOf, encode_delta, encode_part, num_changed
from polyrl.weights.shares import StreamShare
from polyrl.wire import FromPuller, GetManifest
from polyrl.wire.sealing import Handshake, LastingKeys
from polyrl.wire.serving import Content, Found
from polyrl_trainer.weights.images import Image, Images
from polyrl_trainer.weights.lender import Lender, lent
from polyrl_trainer.weights.server import WeightServer, dialled_endpoint
from polyrl_trainer.weights.share_commands import (
    BufferAnswer,
    CheckCopy,
    CheckedShare,
    Done,
    EncodeChange,
    Encoded,
    GiveChunk,
    Given,
    HashChunks,
    HashedChunks,
    KeepDelta,
    KeepVersions,
    PrepareCopy,
    SampleChange,
    Sampled,
    ShareCommand,
    command_of,
)

SAMPLE_BYTES: Final = 256 << 10
"""Bytes of each part of a version by which its density is known before all is encoded; divides a delta's part."""


@dataclass(eq=False)
class _CopyShare:
    image: Image
    share: StreamShare
    tensors: list[TensorEntry]
    chunks: Mapping[bytes, memoryview] = field(default_factory=dict)
    """By content hash, once they are cut."""

    def bytes_at(self, begin: int, end: int) -> memoryview:
        """Bytes [begin, end) of the stream."""
        return self.image.data[begin - self.share.begin : end - self.share.begin]


class WeightShare:
    """Does what the publisher says, from any thread."""

    def __init__(self) -> None:
        self._images, self._lock = Images(), threading.Lock()
        self._copies: dict[int, _CopyShare] = {}
        self._served: dict[int, _CopyShare] = {}
        self._deltas: dict[int, dict[bytes, bytes]] = {}
        self._threads = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="weight-hash")

    def do(self, command: ShareCommand) -> Any:
        """The command's answer."""
        match command:
            case PrepareCopy():
                return self._prepare(command)
            case CheckCopy():
                return self._check(self._copies[command.copy])
            case SampleChange():
                return self._sample(self._copies[command.copy], self._copies[command.base], command.every)
            case HashChunks():
                return self._hash(self._copies[command.copy], command.chunk_bytes)
            case EncodeChange():
                return self._encode(self._copies[command.copy], self._copies[command.base])
            case KeepDelta():
                with self._lock:
                    self._deltas = {**self._deltas, command.version: command.chunks}
                return Done()
            case KeepVersions():
                self._keep(command)
                return Done()
            case GiveChunk():
                return self._give(command)

    @property
    def each(self) -> EachOf:
        """Works on all of the machine's cores."""
        return self._threads.map

    def image_of(self, copy: int) -> memoryview:
        """Its memory."""
        return self._copies[copy].image.data

    def find(self, version: int, hash_: bytes) -> Content | None:
        """A chunk of its own, for receivers; called by serving threads."""
        if (delta := self._deltas.get(version)) is not None:
            found = delta.get(hash_)
            return None if found is None else Content(memoryview(found), nullcontext)
        served = self._served.get(version)
        if served is None:
            return None
        reading, data = served.image.reading(), served.chunks.get(hash_)
        # In this order: an image that was given back before is not read.
        return Content(data, reading) if data is not None and self._served.get(version) is served else None

    def close(self) -> None:
        """Ends its threads; idempotent."""
        self._threads.shutdown()

    def _prepare(self, command: PrepareCopy) -> BufferAnswer:
        self._forget(command.needed)
        with self._lock:  # also while a buffer is made: who asks again gets the same
            copy = self._copies.get(command.copy)
            if copy is None:
                image = self._images.take(command.share.held - command.share.begin)
                copy = self._copies[command.copy] = _CopyShare(image, command.share, tensors=command.tensors)
        return BufferAnswer(copy.image.path, copy.image.name)

    def _check(self, copy: _CopyShare) -> CheckedShare:
        parts = (copy.bytes_at(one.offset, one.offset + one.size) for one in copy.tensors)
        share = copy.share
        sample = weights.receipt_sample(copy.bytes_at(share.begin, share.end), share.begin)
        return CheckedShare(list(self.each(weights.tensor_checksum, parts)), sample)

    def _sample(self, copy: _CopyShare, base: _CopyShare, every: int) -> Sampled:
        first = -(-copy.share.begin // every) * every
        ends = [(at, min(at + SAMPLE_BYTES, copy.share.held)) for at in range(first, copy.share.end, every)]
        old, new = ([each.bytes_at(*one) for one in ends] for each in (base, copy))
        parts, sizes = list(self.each(encode_part, old, new)), [len(one) for one in new]
        changed = sum(num_changed(part, size) for part, size in zip(parts, sizes, strict=True))
        return Sampled(sum(map(len, parts)), sum(sizes), changed=changed)

    def _hash(self, copy: _CopyShare, chunk_bytes: int) -> HashedChunks:
        data = copy.bytes_at(*copy.share.pieces(chunk_bytes))
        chunks = weights.cut_chunks(data, chunk_bytes, self.each)
        pieces = weights.pieces(data, chunk_bytes)
        copy.chunks = {chunk.hash: piece for chunk, piece in zip(chunks, pieces, strict=True)}
        return HashedChunks(list(chunks))

    def _encode(self, copy: _CopyShare, base: _CopyShare) -> Encoded:
        old, new = (each.bytes_at(*copy.share.pieces(PART_BYTES)) for each in (base, copy))
        return Encoded(b"".join(encode_delta(old, new, self.each)))

    def _keep(self, command: KeepVersions) -> None:
        """Swaps in new dicts whole: serving threads read them without a lock."""
        self._served = {version: self._copies[copy] for version, copy in command.anchors.items()}
        self._deltas = {version: kept for version, kept in self._deltas.items() if version in command.deltas}
        self._forget(command.needed)

    def _forget(self, needed: list[int]) -> None:
        """All that are not needed, but those which were begun after this was said."""
        with self._lock:
            ended = [copy for copy in self._copies if copy not in needed and copy < max(needed, default=-1)]
            images = [self._copies.pop(copy).image for copy in ended]
        for image in images:
            self._images.give_back(image)

    def _give(self, command: GiveChunk) -> Given:
        content = self.find(command.version, command.hash)
        if content is None:
            return Given(b"")
        with content.reading():
            return Given(bytes(content.data))


class ShareServer:
    """What a further machine of the learner has for receivers, until the process ends."""

    def __init__(self, key_file: Path, bind: str, advertise: str = "", lender: Lender | None = None) -> None:
        """Binds and serves; see `WeightPublisher`. Raises InvalidData for a bad key file, OSError when `bind` is
        taken."""
        keys = read_keys(TrainerKeys, key_file)
        lasting = LastingKeys.of(keys.secret_key, keys.public_key, keys.agent_public_key)
        self._share, self._lender = WeightShare(), lender
        self.server = WeightServer(bind, lambda: Handshake(lasting), self._find)
        self.endpoint = dialled_endpoint(self.server, advertise)

    def answer(self, request: bytes) -> bytes:
        """What the publisher is answered; see `share_commands`."""
        return msgspec.msgpack.encode(self._share.do(command_of(request)))

    def close(self) -> None:
        """Ends threads and connections; idempotent."""
        self.server.close()
        self._share.close()

    def _find(self, request: FromPuller) -> Found:
        if isinstance(request, GetManifest):
            return None
        return lent(self._lender, request, self._share.find(request.version, request.hash))
