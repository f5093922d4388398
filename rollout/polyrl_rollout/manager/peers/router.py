"""The manager's ROUTERs: who may connect, frames in by batches, frames out without ever waiting.

Pattern: ROUTER; we bind, peers dial with DEALER. CURVE server: libzmq asks `Authenticator` during each handshake (ZAP,
RFC 27), and no frame of a peer whose key is not on the list of the socket gets past it. A peer is known by its ZeroMQ
identity, and a peer that dials again under its identity takes the old connection's place (ROUTER_HANDOVER).
At RECEIVE_HWM frames libzmq stops reading that peer's TCP stream, and the peer's own queue fills. A frame for a peer
that has SEND_HWM waiting, or is not connected, is dropped and counted. Peers whose unfinished messages fill this
process are cut off (`polyrl.wire.unfinished`).

libzmq's descriptor is edge-triggered: it signals once, and any call on the socket may swallow the signal. So a wakeup
reads until nothing is left, and every send is followed by one more read.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from ipaddress import IPv6Address, ip_address
from typing import Final

import structlog
import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

from polyrl import wire
from polyrl.control import bracketed, may_be_ipv6
from polyrl.keys import ManagerKeys
from polyrl_rollout.manager.peers.connections import AgentConnections

RECEIVE_HWM: Final = 256
"""Frames of one peer that wait here; at one Deltas per 50 ms that is 12 s of a stalled manager."""
SEND_HWM: Final = 70_000
"""Frames that wait for one peer; above the 65,536 assignments that the largest engine takes at once."""
HANDSHAKE_MS: Final = 5_000
"""A TCP connection that has not finished its CURVE handshake by then is closed, so strangers cannot pile up."""
BACKLOG: Final = 1_024
"""TCP connections that wait for accept: a whole fleet that reconnects at once."""
MAX_UNFINISHED_BYTES: Final = 128 << 20
"""Bytes of unfinished messages of all agents together. Whole ones that wait count too: a thousand engines send as
much in ten minutes, so the manager has to stand still for that long before honest ones are cut off; they dial again."""
FRAMES_PER_WAKEUP: Final = 256
"""Frames handled before other callbacks of the loop get their turn."""
READ_S: Final = 0.02
"""Seconds after which they get it as well: a frame that is legal, and the dearest to decide, takes up to 0.1 s."""
log = structlog.get_logger(__name__)

FrameHandler = Callable[[bytes, bytes], None]
"""Takes a peer's identity and one frame."""


class Sent(Enum):
    """What became of a frame handed to `send`."""

    QUEUED = "queued"
    """ZeroMQ took it; the peer may still never read it."""
    FULL = "full"
    """Dropped: the peer has SEND_HWM frames waiting."""
    GONE = "gone"
    """Dropped: the peer is not connected."""


@dataclass
class Traffic:
    """Counts of one socket since the process began."""

    frames_in: int = 0
    bytes_in: int = 0
    frames_out: int = 0
    bytes_out: int = 0
    unsent: Counter[str] = field(default_factory=Counter)
    """Frames not sent, by `Sent` value."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Frames received and dropped, by kind; the kinds are a fixed few."""


class Router:
    """A ROUTER bound to `address`:`port` (EVERYWHERE: all addresses; 0: the system chooses)."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: ManagerKeys,
        domain: str,
        *,
        address: str,
        port: int,
        frame_bytes: int,
        unfinished_bytes: int | None = None,
    ) -> None:
        """`domain`: the ZAP domain whose one admitted key guards the socket; a peer that sends a larger frame than
        `frame_bytes` is disconnected, and so are those who hold most of more than `unfinished_bytes` that all peers
        have sent and that are no whole frames yet; None: peers are trusted not to."""
        self.traffic = Traffic()
        self._socket = context.socket(zmq.ROUTER)
        _configure(self._socket, keys, domain)
        self._socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes)
        self._connections = (
            None if unfinished_bytes is None else AgentConnections(context, self._socket, unfinished_bytes)
        )
        endpoint = f"tcp://{bracketed(address)}:{port or '*'}"
        self._socket.ipv6 = may_be_ipv6(endpoint)
        self._socket.bind(endpoint)
        self.endpoint: str = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop = asyncio.get_running_loop()
        self._handler: FrameHandler | None = None
        self._read_planned = False
        self._frame: zmq.Frame | None = None
        """The one that is handled."""
        self._skips = False
        """The rest of a message of too many parts is still to be read."""
        self._checking: asyncio.TimerHandle | None = None

    def start(self, handler: FrameHandler, idle: Callable[[], None]) -> None:
        """Hands each frame to `handler`; calls `idle` after every batch."""
        self._handler = handler
        self._idle = idle
        self._loop.add_reader(self._descriptor, self._read)
        self._plan_read()
        self._check_unfinished()

    def send(self, identity: bytes, frame: bytes) -> Sent:
        """Queues one frame for a peer, or returns why not; never waits."""
        try:
            self._socket.send_multipart((identity, frame), zmq.DONTWAIT, copy=True)
        except zmq.Again:
            sent = Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            sent = Sent.GONE
        else:
            self.traffic.frames_out += 1
            self.traffic.bytes_out += len(frame)
            self._plan_read()
            return Sent.QUEUED
        self.traffic.unsent[sent.value] += 1
        self._plan_read()
        return sent

    def refuse(self, identity: bytes, frame: bytes, may_pass: bool) -> None:
        """Drops a frame that cannot be decoded. Its sender, if of another wire version, reads why in that version."""
        why = wire.other_version(frame)
        kind = "version" if why else "undecodable"
        self.traffic.dropped[kind] = times = self.traffic.dropped[kind] + 1
        if why:
            self.send(identity, frame[:1] + wire.encode(wire.Fenced(why, lease_over=may_pass))[1:])
        if why and times & (times - 1) == 0:
            log.warning("a peer of another version is refused", times=times, why=why)

    def sender_host(self) -> str:
        """The address that the frame which is handled came from; empty when that is not known."""
        with contextlib.suppress(zmq.ZMQError, ValueError):
            address = ip_address(self._frame.get("Peer-Address") if self._frame is not None else "")
            if isinstance(address, IPv6Address):
                return str(address.ipv4_mapped or f"[{address}]")
            return str(address)
        return ""

    def close(self, linger_s: float) -> None:
        """Stops reading; gives queued frames `linger_s` to leave."""
        if self._handler is not None:
            self._loop.remove_reader(self._descriptor)
            self._handler = None
        if self._checking is not None:
            self._checking.cancel()
        if self._connections is not None:
            self._connections.close()
        self._socket.close(linger=int(linger_s * 1000))

    def _plan_read(self) -> None:
        if not self._read_planned and self._handler is not None:
            self._read_planned = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._read_planned = False
        handler = self._handler
        if handler is None:
            return
        until = time.monotonic() + READ_S
        for _ in range(FRAMES_PER_WAKEUP):
            try:
                message = self._receive()
            except zmq.Again:
                break
            if message is not None:
                handler(*message)
            if time.monotonic() > until:
                self._plan_read()
                break
        else:
            self._plan_read()
        self._idle()

    def _receive(self) -> tuple[bytes, bytes] | None:
        """A peer's identity and its frame; None for a part of a message that has more. Raises zmq.Again.

        Part by part: libzmq bounds what one part holds, and not how many a message has; whoever is let in may send
        millions, and they must not be gathered, nor all be read at once."""
        receive, traffic = self._socket.recv, self.traffic
        # libzmq gives a message whole or not at all.
        identity = b"" if self._skips else receive(zmq.DONTWAIT)
        frame = receive(zmq.DONTWAIT, copy=False)
        if self._skips or frame.more:
            traffic.frames_in += not self._skips
            traffic.dropped["parts"] += not self._skips
            self._skips = frame.more
            return None
        if self._connections is not None:
            self._connections.messages.handed_over(int(frame.get(zmq.SRCFD)))
        self._frame = frame
        traffic.frames_in += 1
        traffic.bytes_in += len(frame)
        return identity, frame.bytes

    def _check_unfinished(self) -> None:
        """Has peers cut off whose unfinished messages fill this process, and plans the next check."""
        if self._connections is None or not self._connections.can_be_seen:
            return
        waits = bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        if waits:
            self._plan_read()
        if cut := self._connections.check(drained=not waits):
            self.traffic.dropped["unfinished"] += cut
        self._checking = self._loop.call_later(self._connections.messages.check_s, self._check_unfinished)


def _configure(socket: zmq.Socket[bytes], keys: ManagerKeys, domain: str) -> None:
    socket.curve_server = True
    socket.curve_publickey = keys.public_key.encode()
    socket.curve_secretkey = keys.secret_key.encode()
    socket.setsockopt_string(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
    socket.setsockopt(zmq.SNDHWM, SEND_HWM)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.BACKLOG, BACKLOG)
    socket.setsockopt(zmq.LINGER, 0)


class Authenticator(AsyncioAuthenticator):
    """The ZAP handler of a context; it must run before the context's sockets bind."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], admitted: Mapping[str, str]) -> None:
        """`admitted` maps a ZAP domain to the one public key that may enter it."""
        super().__init__(context)
        self._admitted = admitted
        self.refused: Counter[str] = Counter()
        """Handshakes refused so far for their key, by domain."""
        for domain in admitted:
            self.configure_curve_callback(domain, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """True when `key` (Z85) may enter `domain`; the name is pyzmq's."""
        admitted = key == self._admitted[domain].encode()
        self.refused[domain] += not admitted
        return admitted
