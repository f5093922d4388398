"""A connection between two pods of a trainer, sealed frame by frame (`wire.sealing`), with a thread that listens.

Both sides have the trainer's own pair of keys, and show it by the first frame that the other can open.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from polyrl.errors import ProtocolError
from polyrl.wire.sealing import PUBLIC_BYTES, Handshake, LastingKeys, Opener, Sealer, sealed_frames
from polyrl.wire.serving import SIZE_BYTES, new_buffer
from polyrl_trainer.backends.fsdp.heartbeat import PeerLink
from polyrl_trainer.backends.fsdp.pods.messages import FRAME_BYTES, HeartbeatMessage, PodMessage, frame_of, message_of

PROTOCOL: Final = b"polyrl trainer 1"
ABOUT: Final = b"pod"
ABOUT_BYTES: Final = b"share"
SEALED_BYTES: Final = FRAME_BYTES + Sealer.overhead
POD_HANDSHAKE_S: Final = 10.0
"""From a connection to the first message of the other side, which does nothing else meanwhile."""
PROBE_S: Final = 5
GONE_S: Final = 15
"""Nothing has come for so long from the system at the other side, which answers however busy its processes are."""


class PodLink(PeerLink):
    """One side of a connection whose keys are agreed. Words may be said from any thread."""

    def __init__(self, connection: socket.socket, sealer: Sealer, opener: Opener, until: float | None) -> None:
        """`until`: by when its first message must be here, on the monotonic clock."""
        self._until = until
        # Without it a small answer waits for its question's echo.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._sealer, self._opener = connection, sealer, opener
        self._saying = threading.Lock()
        self._heard = threading.Event()

    @classmethod
    def dial(cls, address: tuple[str, int], keys: LastingKeys) -> PodLink:
        """Raises OSError where nobody answers, ProtocolError where a stranger does."""
        until = time.monotonic() + POD_HANDSHAKE_S
        connection = socket.create_connection(address, POD_HANDSHAKE_S)
        handshake = Handshake(keys, PROTOCOL)
        try:
            connection.sendall(PROTOCOL + handshake.public)
            sealer, opener = handshake.finish(_exactly(connection, PUBLIC_BYTES, until), dialled=True)
        except BaseException:
            connection.close()
            raise
        return cls(connection, sealer, opener, until)

    @classmethod
    def answer(cls, connection: socket.socket, keys: LastingKeys) -> PodLink:
        """The link on a connection that was accepted. Raises OSError, or ProtocolError for a stranger."""
        until = time.monotonic() + POD_HANDSHAKE_S
        handshake = Handshake(keys, PROTOCOL)
        if _exactly(connection, len(PROTOCOL), until) != PROTOCOL:
            raise ProtocolError("whoever dialled is no pod of this trainer")
        theirs = _exactly(connection, PUBLIC_BYTES, until)
        connection.sendall(handshake.public)
        return cls(connection, *handshake.finish(theirs, dialled=False), until)

    @property
    def peer(self) -> str:
        """The other side's address."""
        return str(self._connection.getpeername()[0])

    def send(self, message: PodMessage) -> None:
        """To one that is gone nothing is said: its end is noticed by whoever listens."""
        with self._saying, suppress(OSError):
            buffer = memoryview(bytearray(SEALED_BYTES))
            self._connection.sendall(self._sealer.seal(frame_of(message), ABOUT, buffer))

    def next(self) -> PodMessage:
        """What the other side says next. Raises OSError when it is gone, ProtocolError when it is another."""
        content = bytearray(FRAME_BYTES)
        self._opener.open(_exactly(self._connection, SEALED_BYTES, self._until), ABOUT, memoryview(content))
        self._heard.set()
        return message_of(bytes(content))

    def send_bytes(self, content: bytes, within_s: float | None = None) -> None:
        """Any number of bytes, after messages. Raises OSError when the other side is gone, or takes none of it for so
        long."""
        buffer, about = new_buffer(), ABOUT_BYTES
        self._connection.settimeout(within_s)
        with self._saying:
            size = len(content).to_bytes(SIZE_BYTES, "big")
            self._connection.sendall(self._sealer.seal(size, about, buffer))
            for begin, end in sealed_frames(len(content)):
                self._connection.sendall(self._sealer.seal(memoryview(content)[begin:end], about, buffer))

    def next_bytes(self, within_s: float | None = None) -> bytes:
        """Inverse of `send_bytes`. Raises as `next`, and TimeoutError when not all has come by then."""
        until = None if within_s is None else time.monotonic() + within_s
        size = bytearray(SIZE_BYTES)
        self._open(memoryview(size), until)
        content = memoryview(bytearray(int.from_bytes(size, "big")))
        for begin, end in sealed_frames(len(content)):
            self._open(content[begin:end], until)
        return bytes(content)

    def _open(self, content: memoryview, until: float | None) -> None:
        sealed = _exactly(self._connection, len(content) + Sealer.overhead, until)
        self._opener.open(sealed, ABOUT_BYTES, content)

    def keep_alive(self) -> None:
        """From now on an end that nobody has said, as of a network in between, is noticed after GONE_S."""
        options = {
            socket.TCP_KEEPIDLE: PROBE_S,
            socket.TCP_KEEPINTVL: PROBE_S,
            socket.TCP_KEEPCNT: GONE_S // PROBE_S - 1,
            socket.TCP_USER_TIMEOUT: GONE_S * 1000,
        }
        with suppress(OSError):  # it has ended
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in options.items():
                self._connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def has_ended(self) -> bool:
        """Whether something is there to be read, as an end is, on a link on which the other side has nothing to say."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(0))

    def listen(self, take: Callable[[PodMessage], None], ended: Callable[[str], None]) -> None:
        """From now on each message but heartbeats goes to `take`, and a connection's end to `ended`: with what was
        wrong with what it sent, if anything; on a thread of its own."""
        self._until = None
        self._connection.settimeout(None)
        threading.Thread(target=self._listen, args=(take, ended), name="pod-link", daemon=True).start()

    def send_heartbeat(self) -> None:
        self.send(HeartbeatMessage())

    def heard(self) -> bool:
        heard = self._heard.is_set()
        self._heard.clear()
        return heard

    def close(self) -> None:
        """The other side notices."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _listen(self, take: Callable[[PodMessage], None], ended: Callable[[str], None]) -> None:
        try:
            while True:
                message = self.next()
                if not isinstance(message, HeartbeatMessage):
                    take(message)
        except OSError:
            ended("")
        except ProtocolError as error:
            ended(str(error))


def _exactly(connection: socket.socket, size: int, until: float | None) -> bytes:
    """Raises OSError when the other side ends before, or has not given all of it by then."""
    found = bytearray()
    while len(found) < size:
        if until is not None and (left := until - time.monotonic()) <= 0:
            raise TimeoutError("the other side took too long")
        connection.settimeout(None if until is None else left)
        part = connection.recv(size - len(found))
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        found += part
    return bytes(found)
