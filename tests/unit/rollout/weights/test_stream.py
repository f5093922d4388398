"""A connection that gives a byte now and then is as good as none."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from polyrl.wire import GetManifest
from polyrl.wire.sealing import Handshake, LastingKeys
from polyrl_rollout.weights.stream import WeightStream, manifest_room

SILENCE_S = 0.2


@pytest.fixture
def trickling() -> Iterator[str]:
    """Where a server listens that greets and then sends a byte every tenth of the longest silence."""
    ended = threading.Event()

    def serve(listener: socket.socket) -> None:
        connected, _ = listener.accept()
        with connected:
            connected.recv(Handshake.greeting_bytes, socket.MSG_WAITALL)
            connected.sendall(Handshake(keys()).public)
            while not ended.wait(SILENCE_S / 10):
                try:
                    connected.send(b"x")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        ended.set()
        thread.join(5.0)


def keys() -> LastingKeys:
    public, secret = (part.decode() for part in zmq.curve_keypair())
    return LastingKeys.of(secret, public, public)


def test_a_connection_that_trickles_is_given_up_after_one_silence(trickling: str) -> None:
    begun = time.monotonic()
    stream = WeightStream(trickling, Handshake(keys()), SILENCE_S, lambda: None)
    with stream, pytest.raises(TimeoutError, match="bytes came in"):
        stream.answer(stream.ask(GetManifest(0)), manifest_room)
    assert time.monotonic() - begun < 10 * SILENCE_S
