"""One connection to the manager: open, greeted by the caller, used, lost. A lost one is never mended but replaced.

Pattern: DEALER; we dial, the manager binds. CURVE client; the identity proves the engine's name. A new connection is a
new socket, so nothing that waited in an old one can arrive after a new greeting. Unreadable frames are dropped and
counted; the first, the second, the fourth, the eighth... is logged.

It is lost at once when nobody listens, our key is refused, the manager ends, or SEND_HWM frames wait; after HANDSHAKE_S
without a handshake; after HEARTBEAT_LOST_MS without an answer to heartbeats.

A partition, injected by a fault, holds messages back in one direction or in both, and neither end is notified. As when
packets are lost on the way, what is sent meanwhile arrives later, in its order. Heartbeats need both directions, so a
partition of either kind that outlasts PARTITION_TOLERATED_S breaks the connection, and what it held is lost.
"""

from __future__ import annotations

import asyncio
from typing import Final, Self, TypeAlias

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from polyrl.control import may_be_ipv6
from polyrl.errors import PolyRLError, ProtocolError
from polyrl.keys import AgentKeys
from polyrl.wire import MAX_FRAME_BYTES, FromAgent, ToAgent, decode_to_agent, encode

log = structlog.get_logger(__name__)

HANDSHAKE_S: Final = 5.0
HEARTBEAT_MS: Final = 2_000
HEARTBEAT_LOST_MS: Final = 6_000
PARTITION_TOLERATED_S: Final = HEARTBEAT_LOST_MS / 1000
SEND_HWM: Final = 1_000
"""Frames that wait here; at one Deltas per 50 ms that is 50 s of a stalled manager."""
RECEIVE_HWM: Final = 0
"""Unlimited: what the manager sends is bounded by our own room."""

ZmqContext: TypeAlias = zmq.Context[zmq.Socket[bytes]]

_LOST: Final = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_CONNECT_RETRIED
)


class LinkDown(PolyRLError):
    """The connection is gone; the message says how."""


class AgentLink:
    """Made by `AgentLink.open`, ended by `close`."""

    def __init__(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        self._socket, self._monitor = socket, monitor
        self._inbox: asyncio.Queue[ToAgent | None] = asyncio.Queue()
        self._up = False
        self._answered = asyncio.Event()
        self._down = ""
        self.dropped_frames = 0
        self._loop = asyncio.get_running_loop()
        self._read_planned = False
        self._partition_timer: asyncio.TimerHandle | None = None
        self._receiving, self._sending = asyncio.Event(), asyncio.Event()
        """Cleared while a partition holds back that direction."""
        self._receiving.set()
        self._sending.set()
        self._held: list[FromAgent] = []
        self._partition_outlasted = False
        self._fds = (int(socket.getsockopt(zmq.FD)), int(monitor.getsockopt(zmq.FD)))
        for fd, read in zip(self._fds, (self._read, self._read_monitor), strict=True):
            self._loop.add_reader(fd, read)
            # The descriptor signals what comes after a read that found nothing, so there has to be a first one.
            self._loop.call_soon(read)

    @classmethod
    async def open(cls, context: ZmqContext, endpoint: str, keys: AgentKeys, identity: bytes) -> Self:
        """A connection whose handshake is over. Raises LinkDown, at once when there is nobody: a manager that started
        again listens elsewhere, and only who dials anew asks where."""
        socket = context.socket(zmq.DEALER)
        _configure(socket, keys, identity)
        link = cls(socket, socket.get_monitor_socket(_LOST | zmq.EVENT_HANDSHAKE_SUCCEEDED))
        try:
            await link._shake_hands(endpoint)
        except BaseException:
            link.close()
            raise
        return link

    async def _shake_hands(self, endpoint: str) -> None:
        try:
            self._socket.ipv6 = may_be_ipv6(endpoint)
            self._socket.connect(endpoint)
            async with asyncio.timeout(HANDSHAKE_S):
                await self._answered.wait()
        except (TimeoutError, zmq.ZMQError):
            raise LinkDown(f"no handshake with the manager at {endpoint}") from None
        if not self._up:
            raise LinkDown(f"no manager at {endpoint}")

    def send(self, message: FromAgent) -> int:
        """Queues a message; returns its bytes, 0 when a partition holds it. Raises LinkDown when the queue is full."""
        if not self._sending.is_set():
            self._held.append(message)
            return 0
        frame = encode(message)
        try:
            self._socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:
            self.fail("the manager does not read")
            raise LinkDown(self._down) from None
        # libzmq's descriptor is edge-triggered, and a send may swallow the edge of an arrival.
        if not self._read_planned:
            self._read_planned = True
            self._loop.call_soon(self._read)
        return len(frame)

    async def receive(self) -> ToAgent:
        """The next message. Raises LinkDown once the connection is gone."""
        message = await self._inbox.get()
        if message is None:
            self._inbox.put_nowait(None)
            raise LinkDown(self._down)
        await self._receiving.wait()
        if self._partition_outlasted:
            raise LinkDown(self._down)
        return message

    def partition(self, inward: bool = True, outward: bool = True) -> None:
        """Nothing passes in these directions until `heal`. Idempotent."""
        if inward:
            self._receiving.clear()
        if outward:
            self._sending.clear()
        if self._partition_timer is None and not self._partition_outlasted:
            self._partition_timer = self._loop.call_later(PARTITION_TOLERATED_S, self._break)

    def heal(self) -> None:
        """What was held passes. Raises LinkDown when that is too much at once. Idempotent."""
        self._end_partition()
        held, self._held = self._held, []
        for message in held:
            self.send(message)

    def _break(self) -> None:
        self._partition_outlasted = True
        self._held.clear()
        self._end_partition()
        self.fail("no answer to heartbeats, in a partition")

    def _end_partition(self) -> None:
        if self._partition_timer is not None:
            self._partition_timer.cancel()
            self._partition_timer = None
        self._receiving.set()
        self._sending.set()

    def fail(self, why: str) -> None:
        """Gives the connection up: `receive` raises from now on."""
        self._down = self._down or why
        self._inbox.put_nowait(None)

    def close(self, linger_s: float = 0.0) -> None:
        """Ends the connection; queued frames get `linger_s` to leave. Idempotent."""
        if self._socket.closed:
            return
        if self._partition_timer is not None:
            self._partition_timer.cancel()
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(linger_s * 1000))

    def _read(self) -> None:
        self._read_planned = False
        while not self._socket.closed:
            try:
                frame = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                self._inbox.put_nowait(decode_to_agent(frame))
            except ProtocolError as error:
                self.dropped_frames += 1
                if self.dropped_frames & (self.dropped_frames - 1) == 0:
                    log.warning("dropped", what="frames of the manager", count=self.dropped_frames, why=str(error))

    def _read_monitor(self) -> None:
        while not self._monitor.closed:
            try:
                frames = self._monitor.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._up = True
            else:
                self.fail("the manager is gone")
            self._answered.set()


def _configure(socket: zmq.Socket[bytes], keys: AgentKeys, identity: bytes) -> None:
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.curve_publickey = keys.public_key.encode()
    socket.curve_secretkey = keys.secret_key.encode()
    socket.curve_serverkey = keys.manager_public_key.encode()
    socket.setsockopt(zmq.SNDHWM, SEND_HWM)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_LOST_MS)
    socket.setsockopt(zmq.LINGER, 0)
