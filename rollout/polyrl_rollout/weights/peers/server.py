"""Gives chunks to other agents of the run, within bounds that keep this machine for its engine.

A connection has a thread of its own, which copies a chunk, seals it frame by frame and sends it. There are UPLOADS
connections at most, together at most UPLOAD_BYTES_PER_S and UPLOAD_CORES. Who is not on the manager's list gets no
byte, and who leaves it loses its connections. Where all are taken, the one that has asked for nothing for longest makes
way; one agent has UPLOADS_EACH at most.

A connection takes its place with its first request, which shows its key. Until then it has one of HANDSHAKES others, of
which the oldest makes way at once: a member's handshake takes milliseconds, a stranger's as long as he likes.

A connection that this agent has opened and offered (`offers`) is answered on as any other, with the same bounds. One
whose first request is such an offer is handed over to who asks.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, TypeAlias

import structlog

from polyrl.errors import ProtocolError
from polyrl.wire import FromPeer, ServeOffer, decode_from_peer
from polyrl.wire.sealing import Handshake, Opener, PeerKeys, PeerReception, Sealer
from polyrl.wire.serving import Content, ServedConnection, new_buffer

UPLOADS: Final = 12
"""Connections at once: twice as many as an agent dials, so that one that nobody has room for is rare."""
UPLOADS_EACH: Final = 2
"""Connections of an agent: an honest one dials once, and again if its machine vanished; beyond, its oldest yields."""
UPLOAD_BYTES_PER_S: Final = 500e6
"""Bytes per second of all uploads: 4 Gbit/s, a fifth of a core, which seals 2.5 GB/s."""
UPLOAD_CORES: Final = 0.5
"""For finding, copying and sealing, of all together: an anchor's chunk out of which fourteen deltas are to be taken
costs five times what another one does, and a question costs the asker next to nothing."""
HANDSHAKES: Final = 64
"""Connections that have shown no key yet; of hundreds of strangers a second each has a tenth of a second."""
HANDSHAKE_S: Final = 5.0
"""A connection that has asked for nothing by then is a stranger's."""
STALL_S: Final = 10.0
"""A frame of 1 MiB that is not read in so long ends its connection."""
IDLE_S: Final = 60.0
MAKES_WAY_S: Final = 1.0
"""Without a request for so long a connection may have to make way for another."""
READ_BYTES: Final = 4096
WAITING_DIALS: Final = 128
"""Beyond them the kernel drops dials, which are repeated a second later."""
STOP_S: Final = 5.0

AnswerKeys: TypeAlias = tuple[Sealer, Opener]

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class _Upload:
    socket: socket.socket
    served: ServedConnection[FromPeer]
    handshake: Handshake
    asked_at: float
    is_own: bool = False
    """Opened from here, and offered."""

    def close(self) -> None:
        """Wakes its thread, which ends it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class PeerServer:
    """Serves until `close`."""

    def __init__(
        self,
        port: int | None,
        host: str,
        keys: PeerKeys,
        admits: Callable[[bytes], bool],
        find: Callable[[FromPeer], Content | None],
        take_offer: Callable[[bytes, socket.socket, AnswerKeys], None] = lambda _, offered, __: offered.close(),
    ) -> None:
        """Port 0: the system chooses; None: it does not listen. `find` is called by several threads, and so is
        `take_offer`, with an agent's public key and a connection on which it may be asked. Raises OSError when the port
        is taken."""
        self._keys, self._admits, self._find, self._take_offer = keys, admits, find, take_offer
        self._listener = None if port is None else _listen(host, port)
        self.port: int = self._listener.getsockname()[1] if self._listener is not None else 0
        self.was_dialled = False
        """By a member: it can be."""
        self._dialled: list[_Upload] = []
        """They have shown no key yet, or wait to be asked on what was offered; the oldest first."""
        self._uploads = set[_Upload]()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._free_at = 0.0
        """When what was sent so far has used its time up, of the network or of the core."""
        self.sent = 0
        """Bytes, of all connections."""
        self._accepting = threading.Thread(target=self._accept, name="peer-server", daemon=True)
        if self._listener is not None:
            self._accepting.start()

    def end(self, keys: Collection[bytes]) -> None:
        """Ends the connections of agents that are let in no more."""
        with self._lock:
            for upload in (*self._dialled, *self._uploads):
                if upload.handshake.peer in keys:
                    upload.close()

    def close(self) -> None:
        """Idempotent."""
        self._ending.set()
        with self._lock:
            for upload in (*self._dialled, *self._uploads):
                upload.close()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._accepting.join(STOP_S)

    def answer(self, offered: socket.socket, keys: AnswerKeys, handshake: Handshake) -> bool:
        """Until a connection ends that was opened from here and offered; whether anything was asked on it."""
        served = ServedConnection(handshake, self._find, decode_from_peer, keys)
        upload = _Upload(offered, served, handshake=handshake, asked_at=time.monotonic(), is_own=True)
        if self._begin(upload):
            self._run(upload)
        return served.requests > 0

    def _begin(self, upload: _Upload) -> bool:
        """False where all is over."""
        with self._lock:
            if self._ending.is_set():
                upload.socket.close()
                return False
            self._dialled.append(upload)
            # Those that were opened from here are known, and few.
            strangers = [one for one in self._dialled if not one.is_own]
            if len(strangers) > HANDSHAKES:
                self._dialled.remove(strangers[0])
                strangers[0].close()
            return True

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._ending.is_set():
            try:
                connected, _ = self._listener.accept()
            except OSError:
                # Closed, or no descriptor is left: those who are served will give theirs back.
                self._ending.wait(MAKES_WAY_S)
                continue
            reception = PeerReception(self._keys, self._admits)
            served = ServedConnection(reception, self._find, decode_from_peer)
            upload = _Upload(connected, served, handshake=reception, asked_at=time.monotonic())
            if not self._begin(upload):
                return
            try:
                threading.Thread(target=self._run, args=(upload,), name="peer-upload", daemon=True).start()
            except RuntimeError:  # no thread is left; those who are served will give theirs back
                self._forget(upload)

    def _admit(self, upload: _Upload) -> None:
        """It has shown its key. Raises ConnectionAbortedError where there is no place for it."""
        with self._lock:
            if upload not in self._dialled or not self._admits(upload.handshake.peer):
                raise ConnectionAbortedError
            own = [one for one in self._uploads if one.handshake.peer == upload.handshake.peer]
            if len(own) >= UPLOADS_EACH:
                self._end(min(own, key=lambda one: one.asked_at))
            if len(self._uploads) >= UPLOADS and not self._make_way():
                raise ConnectionAbortedError
            self._dialled.remove(upload)
            self._uploads.add(upload)

    def _make_way(self) -> bool:
        """Ends the connection that is missed least."""
        oldest = min(self._uploads, key=lambda upload: upload.asked_at)
        if time.monotonic() - oldest.asked_at < MAKES_WAY_S:
            return False
        self._end(oldest)
        return True

    def _end(self, upload: _Upload) -> None:
        """Its thread takes it off in a moment."""
        upload.close()
        self._uploads.discard(upload)

    def _run(self, upload: _Upload) -> None:
        try:
            self._serve(upload)
        except ProtocolError as error:
            log.debug("an agent's connection was refused", error=str(error))
        except OSError:
            pass  # it went, was too slow, or was closed by us
        finally:
            self._forget(upload)

    def _forget(self, upload: _Upload) -> None:
        with self._lock:
            self._uploads.discard(upload)
            if upload in self._dialled:
                self._dialled.remove(upload)
        upload.socket.close()

    def _serve(self, upload: _Upload) -> None:
        served, buffer = upload.served, memoryview(b"")
        upload.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begun = time.monotonic()
        while True:
            while not served.is_waiting:
                used = time.thread_time()
                piece = served.next(buffer)
                self._send(upload, piece, time.thread_time() - used)
            left = HANDSHAKE_S + begun - time.monotonic() if not served.is_authentic else IDLE_S
            upload.socket.settimeout(max(0.01, left))
            data, asked = upload.socket.recv(READ_BYTES), served.requests
            if not data:
                return
            served.receive(data)
            if served.requests and not asked:
                self.was_dialled |= not upload.is_own
                if (keys := served.hand_over(ServeOffer)) is not None and not upload.is_own:
                    # Of its own: this one's descriptor is closed in a moment.
                    self._take_offer(upload.handshake.peer, upload.socket.dup(), keys)
                    return
                self._admit(upload)
                buffer = new_buffer()
            if served.requests > asked:
                upload.asked_at = time.monotonic()

    def _send(self, upload: _Upload, piece: memoryview, core_s: float) -> None:
        """`core_s`: seconds of a core that it took to make."""
        with self._lock:
            now = time.monotonic()
            pause = max(0.0, self._free_at - now)
            takes = max(len(piece) / UPLOAD_BYTES_PER_S, core_s / UPLOAD_CORES)
            self._free_at = max(now, self._free_at) + takes
            self.sent += len(piece)
        if self._ending.wait(pause):
            raise ConnectionAbortedError
        upload.socket.settimeout(STALL_S)
        upload.socket.sendall(piece)
        upload.asked_at = time.monotonic()


def _listen(host: str, port: int) -> socket.socket:
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=WAITING_DIALS, dualstack_ipv6=both)
