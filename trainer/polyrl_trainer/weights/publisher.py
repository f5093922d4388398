"""Numbers of versions, and their bytes, ready for receivers: a snapshot in memory, cut and hashed on all cores.

The newest `keep` versions stay, each as an image of its own (`images`); `server` sends from them. A publication copies
the tensors once (`snapshot`, after which they may change) and hashes them once; it waits for no receiver.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import structlog
import torch
from msgspec.structs import replace

from polyrl import weights
from polyrl.errors import ProtocolError
from polyrl.keys import TrainerKeys, read_keys
from polyrl.weights import CHUNK_BYTES, FileEntry, TensorEntry, VersionManifest, WeightsRef
from polyrl.wire import FromPuller, GetManifest
from polyrl.wire.sealing import Handshake, LastingKeys
from polyrl.wire.serving import Content
from polyrl_trainer.weights.images import Image, Images
from polyrl_trainer.weights.server import MAX_BYTES, MAX_CONNECTIONS, STALL_S, WeightServer, dialled_endpoint

_DTYPES: Final = {
    torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _Kept:
    manifest: VersionManifest
    body: bytes
    image: Image
    chunks: dict[bytes, memoryview]
    """By content hash."""


@dataclass(eq=False)
class WeightsCopy:
    """The tensors of a version as they were when it was made."""

    image: Image
    tensors: list[TensorEntry]
    """Without their checksums until somebody asks for them."""
    files: dict[str, bytes]


class WeightPublisher:
    """Publishes until `close`, one version at a time; `snapshot` and `drop` may be called meanwhile."""

    def __init__(
        self,
        key_file: Path,
        bind: str = "tcp://127.0.0.1:*",
        keep: int = 2,
        chunk_bytes: int = CHUNK_BYTES,
        advertise: str = "",
        max_connections: int = MAX_CONNECTIONS,
        max_bytes: int = MAX_BYTES,
        stall_s: float = STALL_S,
    ) -> None:
        """Binds and serves; `advertise`, if given, is the host that agents reach it by, in place of the one bound.
        `max_bytes` may be on their way to all together, and who reads none of it for `stall_s` makes room.

        Raises InvalidData for a bad key file, OSError when `bind` is taken."""
        keys = read_keys(TrainerKeys, key_file)
        self._public_key, self._keep, self._chunk_bytes = keys.public_key, keep, chunk_bytes
        self._images = Images()
        self._kept: dict[int, _Kept] = {}
        self._hashing = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="weight-hash")
        lasting = LastingKeys.of(keys.secret_key, keys.public_key, keys.agent_public_key)
        self.server = WeightServer(
            bind,
            lambda: Handshake(lasting),
            self._find,
            max_connections=max_connections,
            max_bytes=max_bytes,
            stall_s=stall_s,
        )
        self.endpoint = dialled_endpoint(self.server, advertise)

    def snapshot(self, tensors: Iterable[tuple[str, torch.Tensor]], files: dict[str, bytes]) -> WeightsCopy:
        """A copy: the tensors may change afterwards. Raises ProtocolError when a tensor's dtype has no name."""
        places = _places(tensors)
        image = self._images.take(sum(place.size for place, _ in places))
        for place, tensor in places:
            _copy(tensor, image.data[place.offset : place.offset + place.size])
        return WeightsCopy(image, [place for place, _ in places], files=files)

    def drop(self, snapshot: WeightsCopy) -> None:
        """It is not published after all."""
        self._images.give_back(snapshot.image)

    def content(self, snapshot: WeightsCopy) -> bytes:
        """`weights.weights_hash` of what it will be."""
        self._check(snapshot)
        return weights.weights_hash(snapshot.tensors, _entries(snapshot.files))

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], files: dict[str, bytes]) -> WeightsRef:
        """`snapshot` and `publish_snapshot`."""
        return self.publish_snapshot(version, self.snapshot(tensors, files))

    def publish_snapshot(self, version: int, snapshot: WeightsCopy) -> WeightsRef:
        """Makes it ready to be pulled as `version`. Raises ProtocolError when that was published before with other
        content."""
        begun = time.monotonic()
        content = self.content(snapshot)
        kept = self._hold(self._describe(version, snapshot))
        receipt = weights.Receipt()
        for chunk in weights.pieces(kept.image.data, self._chunk_bytes):
            receipt.add(chunk)
        seconds = round(time.monotonic() - begun, 3)
        log.info("weights published", version=version, bytes=kept.manifest.total_bytes, seconds=seconds)
        return WeightsRef(
            version,
            endpoint=self.endpoint,
            public_key=self._public_key,
            manifest_hash=weights.manifest_hash(kept.body),
            content=content,
            vocabulary=_of_config(snapshot.files, "vocab_size"),
            receipt=receipt.value,
            positions=_of_config(snapshot.files, "max_position_embeddings"),
        )

    def close(self) -> None:
        """Ends threads and connections; idempotent."""
        self.server.close()
        self._hashing.shutdown()

    def _check(self, snapshot: WeightsCopy) -> None:
        def checked(place: TensorEntry) -> TensorEntry:
            data = snapshot.image.data[place.offset : place.offset + place.size]
            return place if place.checksum else replace(place, checksum=weights.tensor_checksum(data))

        snapshot.tensors = list(self._hashing.map(checked, snapshot.tensors))

    def _describe(self, version: int, snapshot: WeightsCopy) -> _Kept:
        data = snapshot.image.data
        chunks = weights.cut_chunks(data, self._chunk_bytes, self._hashing.map)
        manifest = VersionManifest(
            version,
            None,
            kind="full",
            tensors=tuple(snapshot.tensors),
            chunks=chunks,
            files=_entries(snapshot.files),
        )
        pieces = weights.pieces(data, self._chunk_bytes)
        by_hash = {chunk.hash: view for chunk, view in zip(chunks, pieces, strict=True)}
        return _Kept(manifest, weights.encode_manifest(manifest), image=snapshot.image, chunks=by_hash)

    def _hold(self, made: _Kept) -> _Kept:
        """Swaps in a new dict whole: the serving threads read it without a lock."""
        version = made.manifest.version
        known = self._kept.get(version)
        if known is not None:
            self._images.give_back(made.image)
            if known.body != made.body:
                raise ProtocolError(f"weight version {version} was published before with other content")
            return known
        held = {**self._kept, version: made}
        self._kept = {number: held[number] for number in sorted(held)[-self._keep :]}
        for number in held.keys() - self._kept.keys():
            self._images.give_back(held[number].image)
        return made

    def _find(self, request: FromPuller) -> Content | None:
        """Called by serving threads."""
        kept = self._kept.get(request.version)
        if kept is None:
            return None
        if isinstance(request, GetManifest):
            return Content(memoryview(kept.body), nullcontext)
        reading, data = kept.image.reading(), kept.chunks.get(request.hash)
        # In this order: an image that was given back before is not read.
        return Content(data, reading) if data is not None and self._kept.get(request.version) is kept else None


def _places(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[TensorEntry, torch.Tensor]]:
    """Tensors as one byte stream, widest dtypes first so that each starts at a multiple of its width; no checksums
    yet."""
    places, offset = [], 0
    for name, tensor in sorted(tensors, key=lambda item: (-item[1].element_size(), item[0])):
        if tensor.dtype not in _DTYPES:
            raise ProtocolError(f"tensor {name} has dtype {tensor.dtype}, which safetensors cannot name")
        shape = tuple(tensor.shape)
        size = prod(shape) * tensor.element_size()
        entry = TensorEntry(name, _DTYPES[tensor.dtype], shape=shape, offset=offset, size=size, checksum=b"")
        places.append((entry, tensor))
        offset += size
    return places


def _entries(files: dict[str, bytes]) -> tuple[FileEntry, ...]:
    return tuple(weights.file_entry(name, content) for name, content in sorted(files.items()))


def _copy(tensor: torch.Tensor, place: memoryview) -> None:
    """The tensor's bytes, row-major, from whatever device."""
    if len(place):
        torch.frombuffer(place, dtype=tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def _of_config(files: dict[str, bytes], name: str) -> int:
    """A size of the model by its config.json; 0 where that does not say it."""
    size = json.loads(files.get("config.json", b"{}")).get(name, 0)
    return size if isinstance(size, int) else 0
