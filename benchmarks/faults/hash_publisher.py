"""Serves weight versions to agents without torch: one tensor of eight bytes a version, over the wire that all use."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Final

from hash_engine import VOCABULARY

from polyrl.keys import TrainerKeys, read_keys
from polyrl.weights import (
    VersionManifest,
    WeightsRef,
    cut_chunks,
    encode_manifest,
    file_entry,
    manifest_hash,
    tensor_entry,
)
from polyrl.wire import FromPuller, GetManifest
from polyrl.wire.sealing import Handshake, LastingKeys
from polyrl.wire.serving import Content
from polyrl_trainer.weights.server import WeightServer, dialled_endpoint

CONFIG: Final = {"vocab_size": VOCABULARY, "max_position_embeddings": 4096}
BYTES: Final = 8


class HashPublisher:
    """Every version from the first request on, made from its number."""

    def __init__(self, keys: TrainerKeys) -> None:
        self.public_key = keys.public_key
        lasting = LastingKeys.of(keys.secret_key, keys.public_key, keys.agent_public_key)
        self._server = WeightServer("tcp://127.0.0.1:*", lambda: Handshake(lasting), answer_to)
        self.endpoint = dialled_endpoint(self._server, "")

    def ref_of(self, version: int) -> WeightsRef:
        """What is sent to the manager."""
        digest = manifest_hash(encode_manifest(version_of(version)[0]))
        return WeightsRef(version, self.endpoint, public_key=self.public_key, manifest_hash=digest)

    def close(self) -> None:
        self._server.close()


def answer_to(request: FromPuller) -> Content:
    """A version's manifest, or its only chunk."""
    manifest, data = version_of(request.version)
    return Content(memoryview(encode_manifest(manifest) if isinstance(request, GetManifest) else data), nullcontext)


def version_of(version: int) -> tuple[VersionManifest, bytes]:
    """The manifest of a version, and its only chunk's bytes."""
    data = version.to_bytes(BYTES, "little")
    tensors = (tensor_entry("weights", "I64", (1,), 0, data),)
    files = (file_entry("config.json", json.dumps(CONFIG).encode()),)
    return VersionManifest(version, None, kind="anchor", tensors=tensors, chunks=cut_chunks(data), files=files), data


@asynccontextmanager
async def publishing(key_file: Path) -> AsyncIterator[HashPublisher]:
    """A publisher at work."""
    publisher = HashPublisher(read_keys(TrainerKeys, key_file))
    try:
        yield publisher
    finally:
        publisher.close()
