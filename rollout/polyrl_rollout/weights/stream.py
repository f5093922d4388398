"""One connection to who serves weights: blocking, for a thread of its own; `polyrl.wire.serving` is the other side.

A frame is received into a buffer that is used again, and opened into the place where its content belongs. Bytes
pass through no Python object.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Final

from polyrl import wire
from polyrl.errors import ProtocolError
from polyrl.wire.sealing import PUBLIC_BYTES, Handshake, Opener, Sealer, sealed_frames
from polyrl.wire.serving import ABOUT_REQUESTS, LENGTH_BYTES, SIZE_BYTES, new_buffer

MAX_MANIFEST_BYTES: Final = 256 << 20
"""32 MiB of files, and 100 bytes for each of two million tensors and chunks: 8 TB."""
SLOWEST: Final = 2048
"""Bytes per second; a connection that gives less is as good as silent. An eighth of what each of four gets of a link at
which a chunk takes the longest pause between chunks."""


class WeightStream:
    """Asks and is answered in the same order, until `close`, which any thread may call."""

    def __init__(self, endpoint: str, handshake: Handshake, silence_s: float, check: Callable[[], None]) -> None:
        """Dials. `check` is called at least every `silence_s` and before each frame while something is awaited, and may
        raise.

        Raises OSError when nobody is there or less than SLOWEST came for `silence_s`; so do all methods."""
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._check, self._buffer, self._silence_s = check, new_buffer(), silence_s
        self._socket = socket.create_connection((host.strip("[]"), int(port)), silence_s)
        with contextlib.ExitStack() as failed:
            failed.callback(self._socket.close)
            self._set_deadline(silence_s)
            self._socket.sendall(handshake.greeting)
            theirs = memoryview(bytearray(PUBLIC_BYTES))
            self._receive(theirs)
            try:
                self._sealer, self._opener = handshake.finish(bytes(theirs), dialled=True)
            except ProtocolError as error:
                raise ConnectionAbortedError(str(error)) from error
            failed.pop_all()

    def ask(self, request: wire.FromPeer | wire.GetLent) -> bytes:
        """What its answer is about."""
        body, buffer = wire.encode(request), self._buffer
        length = bytes(self._sealer.seal(len(body).to_bytes(LENGTH_BYTES, "big"), ABOUT_REQUESTS, buffer))
        self._socket.sendall(length + bytes(self._sealer.seal(body, ABOUT_REQUESTS, buffer)))
        return body

    def offer(self) -> tuple[socket.socket, tuple[Sealer, Opener]]:
        """Whom it has dialled may ask, on this connection; what is needed to answer him."""
        self.ask(wire.ServeOffer())
        return self._socket, (self._sealer, self._opener)

    def answer(self, about: bytes, place: Callable[[int], memoryview]) -> bool:
        """Writes the next answer to `place(its size)`; False when it is not kept. Raises what `place` raises for a size
        that is none."""
        size = memoryview(bytearray(SIZE_BYTES))
        self._open(size, about)
        self._check()
        number = int.from_bytes(size, "big")
        if number:
            self._fill(number, about, place)
        return bool(number)

    def _fill(self, number: int, about: bytes, place: Callable[[int], memoryview]) -> None:
        """With what follows the answer's first word."""
        content = place(number)
        for begin, end in sealed_frames(number):
            # Frame by frame: one that comes just in time each time would hold a large answer's receiver for ever.
            self._check()
            self._open(content[begin:end], about)

    def close(self) -> None:
        """Also wakes the thread that waits for an answer; idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> WeightStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _set_deadline(self, seconds: float) -> None:
        # The kernel's own: a frame takes one call, where Python's deadline would take one for what lies there.
        whole = int(seconds)
        kernel = struct.pack("ll", whole, int((seconds - whole) * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, kernel)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _open(self, content: memoryview, about: bytes) -> None:
        sealed = self._opener.place(content, self._buffer)
        self._receive(sealed)
        try:
            self._opener.open(sealed, about, content)
        except ProtocolError as error:
            # Somebody on the way, or a server with another key: as good as a connection that broke.
            raise ConnectionAbortedError(str(error)) from error

    def _receive(self, view: memoryview) -> None:
        while len(view):
            received = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            if not received:
                raise ConnectionResetError("the connection was closed")
            view = view[received:]
            if len(view):
                # Less than was asked for came by the deadline alone.
                self._check()
                if received < SLOWEST * self._silence_s:
                    raise TimeoutError(f"{received} bytes came in {self._silence_s:g} s")


class OfferedStream(WeightStream):
    """A stream on a connection that the other side has opened, and offered."""

    def __init__(
        self, connected: socket.socket, keys: tuple[Sealer, Opener], silence_s: float, check: Callable[[], None]
    ) -> None:
        self._check, self._buffer, self._silence_s = check, new_buffer(), silence_s
        self._socket, (self._sealer, self._opener) = connected, keys
        self._set_deadline(silence_s)


def manifest_room(size: int) -> memoryview:
    """Where a manifest of that size goes. Raises ProtocolError for one that cannot be."""
    if size > MAX_MANIFEST_BYTES:
        raise ProtocolError(f"a manifest of {size} bytes is over the limit of {MAX_MANIFEST_BYTES}")
    return memoryview(bytearray(size))
