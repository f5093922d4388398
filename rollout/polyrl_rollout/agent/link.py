"""One connection to the manager: open, greeted by the caller, used, lost. A lost one is never mended but replaced.

Pattern: DEALER; we dial, the manager binds. CURVE client; the identity is the engine's name. So nothing that waited in
an old connection can arrive after a new greeting. Unreadable frames are dropped and counted; the first is told, the
second, the fourth, the eighth...

    what                                     when            then
    nobody listens, or refuses our key       at once         LinkDown
    TCP or CURVE handshake                   HANDSHAKE_S     LinkDown
    no answer to ZMTP heartbeats             HEARTBEAT_LOST  LinkDown
    the manager closed, died or was killed   at once         LinkDown
    SEND_HWM frames wait to be sent          at once         LinkDown

Refuses to hold: what is said, when to try again (see `app`). Read next: `tokens`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
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
SEND_HWM: Final = 1_000
"""Frames that wait here; at one Deltas per 50 ms that is 50 s of a stalled manager."""
RECEIVE_HWM: Final = 0
"""Unlimited: what the manager says is bounded by our own credit."""

ZmqContext: TypeAlias = zmq.Context[zmq.Socket[bytes]]

_LOST: Final = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_CONNECT_RETRIED
)


class LinkDown(PolyRLError):
    """The connection is gone; the sentence says how."""


@dataclass(frozen=True)
class ManagerAddress:
    """Where the manager listens for agents."""

    endpoint: str
    public_key: str


class Link:
    """Made by `Link.open`, ended by `close`."""

    def __init__(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        self._socket, self._monitor = socket, monitor
        self._inbox: asyncio.Queue[ToAgent | None] = asyncio.Queue()
        self._up = False
        self._answered = asyncio.Event()
        self._down = ""
        self.dropped_frames = 0
        self._loop = asyncio.get_running_loop()
        self._look_planned = False
        self._fds = (int(socket.getsockopt(zmq.FD)), int(monitor.getsockopt(zmq.FD)))
        for fd, look in zip(self._fds, (self._look, self._watch), strict=True):
            self._loop.add_reader(fd, look)
            # The descriptor signals what comes after a look that found nothing, so there has to be a first one.
            self._loop.call_soon(look)

    @classmethod
    async def open(cls, context: ZmqContext, address: ManagerAddress, keys: AgentKeys, engine: str) -> Self:
        """A connection whose handshake is over. Raises LinkDown, at once when there is nobody: a manager that started
        again listens elsewhere, and only who dials anew asks where."""
        socket = context.socket(zmq.DEALER)
        _configure(socket, address, keys, engine)
        link = cls(socket, socket.get_monitor_socket(_LOST | zmq.EVENT_HANDSHAKE_SUCCEEDED))
        try:
            await link._shake_hands(address.endpoint)
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
        """Queues a message; returns its bytes. Raises LinkDown when the queue is full."""
        frame = encode(message)
        try:
            self._socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:
            self.fail("the manager does not read")
            raise LinkDown(self._down) from None
        # libzmq's descriptor is edge-triggered, and a send may swallow the edge of an arrival.
        if not self._look_planned:
            self._look_planned = True
            self._loop.call_soon(self._look)
        return len(frame)

    async def receive(self) -> ToAgent:
        """The next message. Raises LinkDown once the connection is gone."""
        message = await self._inbox.get()
        if message is None:
            self._inbox.put_nowait(None)
            raise LinkDown(self._down)
        return message

    def fail(self, why: str) -> None:
        """Gives the connection up: `receive` raises from now on."""
        self._down = self._down or why
        self._inbox.put_nowait(None)

    def close(self, linger_s: float = 0.0) -> None:
        """Ends the connection; queued frames get `linger_s` to leave. Idempotent."""
        if self._socket.closed:
            return
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(linger_s * 1000))

    def _look(self) -> None:
        self._look_planned = False
        while not self._socket.closed:
            try:
                frame = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                self._inbox.put_nowait(decode_to_agent(frame))
            except ProtocolError as error:
                self._dropped(error)

    def _dropped(self, why: ProtocolError) -> None:
        self.dropped_frames += 1
        if self.dropped_frames & (self.dropped_frames - 1) == 0:
            log.warning("dropped", what="frames of the manager", count=self.dropped_frames, why=str(why))

    def _watch(self) -> None:
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


def _configure(socket: zmq.Socket[bytes], address: ManagerAddress, keys: AgentKeys, engine: str) -> None:
    socket.setsockopt(zmq.IDENTITY, engine.encode())
    socket.curve_publickey = keys.public_key.encode()
    socket.curve_secretkey = keys.secret_key.encode()
    socket.curve_serverkey = address.public_key.encode()
    for option, value in (
        (zmq.SNDHWM, SEND_HWM),
        (zmq.RCVHWM, RECEIVE_HWM),
        (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
        (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_LOST_MS),
        (zmq.LINGER, 0),
    ):
        socket.setsockopt(option, value)
