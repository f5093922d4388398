"""What the publisher measures of the network, by which it decides between an anchor and a delta."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

import torch

from polyrl.wire import GetChunk, encode
from polyrl_trainer.weights.publisher import WeightPublisher
from tests.integration.weights.conftest import FILES, SEALED_ONLY, Keys
from tests.integration.weights.test_weight_plane_faults import Dialled

READ_BYTES = 64 << 10
READ_S = 0.03
SPEED = READ_BYTES / READ_S
"""Bytes per second, at most."""
CHUNK = 1 << 20
CHUNKS = 8
READS = 60


def read_slowly(keys: Keys, endpoint: str, requests: list[bytes]) -> None:
    dialled = Dialled(keys, endpoint)
    # What lies in it has left the sender, unread: by itself it grows to megabytes where a busy core reads in bursts.
    dialled.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)
    dialled.socket.sendall(b"".join(dialled.frames(request) for request in requests))
    for _ in range(READS):
        dialled.socket.recv(READ_BYTES)
        time.sleep(READ_S)
    dialled.socket.close()


@SEALED_ONLY
async def test_a_slow_network_is_measured_as_one_and_a_delta_pays(
    keys: Keys, publishers: Callable[..., WeightPublisher]
) -> None:
    """What the system's buffers took at once counted, and nothing else: 3 GB/s of a link of 16 Mbit/s."""
    publisher = publishers(chunk_bytes=CHUNK)
    words = torch.randint(0, 1 << 15, (CHUNKS * CHUNK // 2,), dtype=torch.int16)
    publisher.publish(0, [("a", words)], FILES)
    requests = [encode(GetChunk(0, chunk.hash)) for chunk in publisher._kept[0].manifest.chunks]
    await asyncio.to_thread(read_slowly, keys, publisher.endpoint, requests)
    assert 0 < publisher.server.bandwidth < 2 * SPEED
    words[::64] += 1
    publisher.publish(1, [("a", words)], FILES)
    assert publisher._kept[1].manifest.kind == "delta"
