"""Answers many receivers over plain sockets, on threads of its own: one that reads slowly costs the learner nothing.

connections   as many as may be open at once; one that has shown no key after HANDSHAKE_S, or has asked for nothing
              whole and read nothing for IDLE_S, is closed. Beyond them those make room that were silent for longest, of
              the address that has most
buffers       sealed frames on their way lie in buffers of a frame each, used again and again; there are as many as
              `max_bytes` holds. While somebody waits for one, a receiver that holds one and has read less than
              LEAST_READ in STALL_S loses its connection, whatever it asks for meanwhile. The last quarter is for
              addresses that hold none, so whoever has one machine takes not all, and those who read go on
fairness      a frame per receiver and turn; ALONE_FRAMES for one beside whom nobody is ready or waits for a buffer
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import heapq
import resource
import selectors
import socket
import sys
import termios
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Final

from polyrl.control import bracketed
from polyrl.errors import ProtocolError
from polyrl.wire import FromPuller, decode_from_puller
from polyrl.wire.sealing import Handshake
from polyrl.wire.serving import BUFFER_BYTES, Found, ServedConnection, new_buffer
from polyrl_trainer.dropped_messages import DroppedMessages
from polyrl_trainer.weights.throughput import REMEMBERED_S, SAMPLE_S, Throughput

MAX_BYTES: Final = 256 << 20
"""Sealed and not yet in the system's buffers, of all receivers together; twice what a link of 100 Gbit/s holds over
10 ms."""
MAX_CONNECTIONS: Final = 5120
"""Open at once: 1,024 rollouts, as many as a manifest allows, four streams each, and those that are being replaced; but
half of the files that this process may open are the trainer's own."""
HANDSHAKE_S: Final = 5.0
STALL_S: Final = 5.0
MAKES_WAY_S: Final = 1.0
"""After which a receiver may have to make way for a new one."""
LEAST_READ: Final = 64 << 10
"""Bytes of a frame in STALL_S: as many buffers as there are, read so slowly, take a link of 30 Mbit/s."""
IDLE_S: Final = 60.0
"""As long as a receiver waits for its next chunk."""
CHECK_S: Final = 0.5
"""Between checks of what is overdue."""
NO_FILES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Nothing more can be opened for now."""
THREADS: Final = 4
"""A core seals and sends some 3 GB/s; they sleep where nobody asks."""
ALONE_FRAMES: Final = 4
"""A chunk: what each turn costs by itself is a tenth of a sender's time, and others wait 2 ms at most."""
READ_BYTES: Final = 4096
"""Requests are tens of bytes."""
BACKLOG: Final = 128
STOP_S: Final = 5.0
"""Longest wait for a thread to notice that it should end."""


@dataclass(eq=False)
class _Peer:
    socket: socket.socket
    connection: ServedConnection[FromPuller]
    begun: float
    heard: float
    """When it last asked for something whole or, with a buffer, had read LEAST_READ more of it."""
    address: str = ""
    read: int = 0
    """Bytes since `heard`."""
    left: memoryview = field(default_factory=lambda: memoryview(b""))
    """What is left of the piece on its way."""
    buffer: memoryview | None = None
    events: int = selectors.EVENT_READ
    """Events that are selected for this connection."""


class WeightServer:
    """Answers requests by `find`, which is called by several threads and may not wait, until `close`."""

    def __init__(
        self,
        bind: str,
        handshake: Callable[[], Handshake],
        find: Callable[[FromPuller], Found],
        max_connections: int = MAX_CONNECTIONS,
        max_bytes: int = MAX_BYTES,
        stall_s: float = STALL_S,
    ) -> None:
        """`bind` is `tcp://HOST:PORT`; host `*` is every address, port `*` any. Raises OSError when it is taken."""
        self.find, self.handshake, self.stall_s = find, handshake, stall_s
        self.refused = DroppedMessages("connections of weight receivers that spoke otherwise")
        self.stalled = DroppedMessages("weights for receivers that take none, or are gone")
        # Strangers' connections count until their handshake's deadline: the more there may be, the dearer it is to use
        # all of them up.
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        most = min(max_connections, hard // 2)
        self._listener = _listen(bind)
        self.host, self.port = self._listener.getsockname()[:2]
        buffers = max(1, max_bytes // BUFFER_BYTES // THREADS)
        self._threads = [_ServingThread(self, buffers, max(1, most // THREADS)) for _ in range(THREADS)]
        self._threads[0].listen(self._listener)
        for thread in self._threads:
            thread.start()

    @property
    def num_connections(self) -> int:
        return sum(thread.num_connections for thread in self._threads)

    @property
    def bandwidth(self) -> float:
        """Bytes per second to all receivers while some were read; 0 before the first."""
        measured = [thread.throughput for thread in self._threads]
        seconds = max(each.seconds for each in measured)
        return sum(each.bytes for each in measured) / seconds if seconds else 0.0

    @property
    def is_sending(self) -> bool:
        """Something was sent a moment ago, or has not left this machine yet."""
        return any(thread.throughput.is_under_way for thread in self._threads)

    def forget_half(self) -> None:
        """Halves the weight of what was measured of the bandwidth so far. May be called from any thread."""
        for thread in self._threads:
            thread.throughput.halve()

    def close(self) -> None:
        """Ends threads and connections; idempotent."""
        for thread in self._threads:
            thread.stop()
        for thread in self._threads:
            thread.join(STOP_S)
        self._listener.close()

    def accept(self) -> bool:
        """Gives a new connection to the thread with the fewest; False when it cannot be opened."""
        try:
            connected, (address, *_) = self._listener.accept()
        except OSError as error:
            return error.errno not in NO_FILES
        with contextlib.ExitStack() as failed, contextlib.suppress(OSError):
            failed.callback(connected.close)
            connected.setblocking(False)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            min(self._threads, key=lambda thread: thread.num_connections).adopt(connected, address)
            failed.pop_all()
        return True


class _ServingThread(threading.Thread):
    """A share of the connections, and of the buffers."""

    def __init__(self, server: WeightServer, buffers: int, connections: int) -> None:
        super().__init__(name="weight-server", daemon=True)
        self._server, self._selector = server, selectors.DefaultSelector()
        self._most = connections
        self._buffers_left, self._buffers = buffers, list[memoryview]()
        self._spare, self._held = buffers // 4, Counter[str]()
        """Buffers for addresses that hold none, and how many each one holds."""
        self._wake, self._waker = socket.socketpair()
        self._new: deque[tuple[socket.socket, str]] = deque()
        self._found: deque[_Peer] = deque()
        """Receivers that wait no longer for an answer."""
        self._peers: set[_Peer] = set()
        self._waiting: deque[_Peer] = deque()
        """For a buffer; nothing is selected for them."""
        self._stopping = False
        self._listener: socket.socket | None = None
        self.throughput, self._sampled_at = Throughput(), -inf
        self._flowing: set[_Peer] = set()
        """Something was sent to them, and may lie in the system's buffers."""
        self._selector.register(self._wake, selectors.EVENT_READ, self._take_new)

    @property
    def num_connections(self) -> int:
        return len(self._peers) + len(self._new)

    def listen(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def adopt(self, connected: socket.socket, address: str) -> None:
        """Called by any thread."""
        self._new.append((connected, address))
        self._waker.send(b"\0")

    def stop(self) -> None:
        """Called by any thread."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def _find_again(self, peer: _Peer) -> None:
        """Called by any thread: what it was asked for is there."""
        self._found.append(peer)
        with contextlib.suppress(OSError):  # all is over
            self._waker.send(b"\0")

    def run(self) -> None:
        checked = time.monotonic()
        while not self._stopping:
            self._take_turns()
            if self.throughput.is_under_way and time.monotonic() - self._sampled_at >= SAMPLE_S:
                self._sample_throughput(time.monotonic())
            if time.monotonic() - checked >= CHECK_S:
                checked = time.monotonic()
                self._end_overdue(checked)
                self._listen_again()
        for peer in tuple(self._peers):
            self._end(peer)
        while self._new:
            self._new.popleft()[0].close()
        self._selector.close()
        for ours in (self._wake, self._waker):
            ours.close()

    def _take_turns(self) -> None:
        ready = self._selector.select(SAMPLE_S if self.throughput.is_under_way else CHECK_S)
        frames = ALONE_FRAMES if len(ready) == 1 and not self._waiting else 1
        for key, events in ready:
            if isinstance(key.data, _Peer):
                self._attend(key.data, events, frames)
            else:
                key.data()

    def _accept(self) -> None:
        if self._listener is not None and not self._server.accept():
            # Whoever waits there would have this called again at once, and again, until something is closed.
            self._selector.unregister(self._listener)

    def _listen_again(self) -> None:
        if self._listener is not None and self._listener not in self._selector.get_map():
            self.listen(self._listener)

    def _take_new(self) -> None:
        self._wake.recv(READ_BYTES)
        while self._found:
            if (peer := self._found.popleft()) in self._peers:
                self._select(peer, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while self._new:
            now, (connected, address) = time.monotonic(), self._new.popleft()
            if len(self._peers) >= self._most and not self._make_way(now):
                connected.close()
                continue
            self._begin(connected, address, now)

    def _begin(self, connected: socket.socket, address: str, now: float) -> None:
        def wake() -> None:
            self._find_again(peer)

        connection = ServedConnection(self._server.handshake(), self._server.find, decode_from_puller, wake=wake)
        peer = _Peer(connected, connection, begun=now, heard=now, address=address)
        self._peers.add(peer)
        self._selector.register(connected, selectors.EVENT_READ, peer)

    def _make_way(self, now: float) -> bool:
        """Ends the connections that are missed least, some at once: each search costs as much as many of them."""
        of = Counter(peer.address for peer in self._peers)
        most = max(1, self._most // 2)
        able = [peer for peer in self._peers if now - peer.heard > MAKES_WAY_S or of[peer.address] > most]
        for peer in heapq.nlargest(max(1, self._most // 16), able, lambda peer: (of[peer.address], now - peer.heard)):
            self._server.stalled.add("others come, and it asks for nothing")
            self._end(peer)
        return bool(able)

    def _attend(self, peer: _Peer, events: int, frames: int) -> None:
        if peer not in self._peers:
            return
        try:
            if events & selectors.EVENT_READ:
                self._read(peer)
            if events & selectors.EVENT_WRITE or not peer.connection.is_waiting:
                while self._write(peer) and (frames := frames - 1):
                    pass
                if peer.buffer is not None and not peer.left:
                    self._give_buffer(peer)
        except ProtocolError as error:
            self._server.refused.add(error)
            self._end(peer)
        except OSError:
            self._end(peer)

    def _read(self, peer: _Peer) -> None:
        with contextlib.suppress(BlockingIOError):
            data = peer.socket.recv(READ_BYTES)
            if not data:
                raise ConnectionResetError
            asked = peer.connection.requests
            peer.connection.receive(data)
            if peer.buffer is None and peer.connection.requests > asked:
                peer.heard = time.monotonic()

    def _write(self, peer: _Peer) -> bool:
        """One piece, or what the system takes of it; whether it was all of it, and there are more."""
        if not peer.left:
            if peer.connection.is_waiting:
                self._select(peer, selectors.EVENT_READ)
                return False
            if not self._get_buffer(peer):
                return False
            assert peer.buffer is not None
            peer.left = peer.connection.next(peer.buffer)
        with contextlib.suppress(BlockingIOError):
            sent = peer.socket.send(peer.left)
            peer.left, peer.read = peer.left[sent:], peer.read + sent
            if peer.read >= LEAST_READ:
                peer.heard, peer.read = time.monotonic(), 0
            self._flowing.add(peer)
            self.throughput.send(sent, time.monotonic())
        is_over = not peer.left and peer.connection.is_waiting
        self._select(peer, selectors.EVENT_READ | (0 if is_over else selectors.EVENT_WRITE))
        return not (peer.left or is_over)

    def _sample_throughput(self, now: float) -> None:
        held = {peer: unsent_bytes(peer.socket) for peer in self._flowing}
        self.throughput.sample(sum(held.values()), now)
        self._sampled_at, self._flowing = now, {peer for peer, unsent in held.items() if unsent}
        if self.throughput.seconds > REMEMBERED_S:
            self._server.forget_half()

    def _get_buffer(self, peer: _Peer) -> bool:
        if peer.buffer is None:
            if self._may_have_buffer(peer):
                self._take_buffer(peer)
            elif peer not in self._waiting:
                self._waiting.append(peer)
                self._select(peer, selectors.EVENT_READ)
        return peer.buffer is not None

    def _may_have_buffer(self, peer: _Peer) -> bool:
        return len(self._buffers) + self._buffers_left > (self._spare if self._held[peer.address] else 0)

    def _take_buffer(self, peer: _Peer) -> None:
        if not self._buffers:
            self._buffers_left -= 1
            self._buffers.append(new_buffer())
        peer.buffer, peer.heard, peer.read = self._buffers.pop(), time.monotonic(), 0
        self._held[peer.address] += 1
        # It may have come for another reason than its turn: a turn that it no longer needs is another's.
        self._wait_no_more(peer)

    def _wait_no_more(self, peer: _Peer) -> None:
        # Asked first: the error of a deque spells out what it has not, and took a tenth of a sender's time.
        if peer in self._waiting:
            self._waiting.remove(peer)

    def _give_buffer(self, peer: _Peer) -> None:
        if peer.buffer is not None:
            self._buffers.append(peer.buffer)
            self._held[peer.address] -= 1
            if not self._held[peer.address]:
                del self._held[peer.address]
            peer.buffer, peer.heard = None, time.monotonic()
        # Also for one that had none and ends: it may have been its turn.
        for waiting in self._waiting:
            if self._may_have_buffer(waiting):
                self._waiting.remove(waiting)
                self._select(waiting, selectors.EVENT_READ | selectors.EVENT_WRITE)
                return

    def _select(self, peer: _Peer, events: int) -> None:
        if peer.events != events:
            self._selector.modify(peer.socket, events, peer)
            peer.events = events

    def _end_overdue(self, now: float) -> None:
        for peer in tuple(self._peers):
            silent = now - peer.heard
            strange = not peer.connection.is_authentic and now - peer.begun > HANDSHAKE_S
            stalls = self._waiting and peer.buffer is not None and silent > self._server.stall_s
            if strange or stalls or (silent > IDLE_S and peer not in self._waiting):
                if peer.buffer is not None:
                    self._server.stalled.add("a receiver reads too little")
                self._end(peer)

    def _end(self, peer: _Peer) -> None:
        self._peers.discard(peer)
        self._flowing.discard(peer)
        self._wait_no_more(peer)
        self._selector.unregister(peer.socket)
        peer.socket.close()
        self._give_buffer(peer)


def unsent_bytes(connected: socket.socket) -> int:
    """Bytes that the system holds for a connection: not sent yet, or not confirmed."""
    return int.from_bytes(fcntl.ioctl(connected, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def _listen(bind: str) -> socket.socket:
    host, _, port = bind.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    address = ("" if host == "*" else host, 0 if port == "*" else int(port))
    both = host == "*" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    listener = socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)
    listener.setblocking(False)
    return listener


def dialled_endpoint(server: WeightServer, advertise: str) -> str:
    """Where receivers reach it: at the host that is advertised, else at the one bound."""
    return f"tcp://{bracketed(advertise or server.host)}:{server.port}"
