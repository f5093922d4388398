"""Serves weight versions to agents without torch: one tensor of eight bytes a version, over the wire that all use.

Refuses to hold: the publisher's care for slow pullers and many versions (see `polyrl_trainer.weights.publisher`).
Read next: `hash_trainer`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import zmq
import zmq.asyncio
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
from polyrl.wire import ChunkReply, GetManifest, ManifestReply, decode_from_puller, encode

CONFIG: Final = {"vocab_size": VOCABULARY, "max_position_embeddings": 4096}
BYTES: Final = 8


class HashPublisher:
    """Every version from the first request on, made from its number."""

    def __init__(self, keys: TrainerKeys, socket: zmq.asyncio.Socket) -> None:
        self.public_key = keys.public_key
        self.endpoint = socket.get_string(zmq.LAST_ENDPOINT)
        self._socket = socket

    def ref_of(self, version: int) -> WeightsRef:
        """What is sent to the manager."""
        digest = manifest_hash(encode_manifest(version_of(version)[0]))
        return WeightsRef(version, self.endpoint, public_key=self.public_key, manifest_hash=digest)

    async def serve(self) -> None:
        """Until cancelled."""
        while True:
            identity, body = await self._socket.recv_multipart()
            request = decode_from_puller(body)
            manifest, data = version_of(request.version)
            if isinstance(request, GetManifest):
                reply: ManifestReply | ChunkReply = ManifestReply(request.version, encode_manifest(manifest))
            else:
                reply = ChunkReply(request.hash, data)
            await self._socket.send_multipart([identity, encode(reply)])


def version_of(version: int) -> tuple[VersionManifest, bytes]:
    """The manifest of a version, and its only chunk's bytes."""
    data = version.to_bytes(BYTES, "little")
    chunks = tuple(chunk for chunk, _ in cut_chunks([data]))
    tensors = (tensor_entry("weights", "I64", (1,), 0, data),)
    files = (file_entry("config.json", json.dumps(CONFIG).encode()),)
    return VersionManifest(version, None, kind="full", tensors=tensors, chunks=chunks, files=files), data


@asynccontextmanager
async def publishing(key_file: Path) -> AsyncIterator[HashPublisher]:
    """A publisher at work."""
    keys = read_keys(TrainerKeys, key_file)
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.curve_server, socket.linger = True, 0
        socket.curve_publickey, socket.curve_secretkey = keys.public_key.encode(), keys.secret_key.encode()
        socket.bind("tcp://127.0.0.1:*")
        publisher = HashPublisher(keys, socket)
        serving = asyncio.create_task(publisher.serve())
        try:
            yield publisher
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
