"""The manager's two ROUTERs: who may connect, frames in by batches, frames out without ever waiting, their messages.

Pattern: ROUTER; we bind, peers dial with DEALER. CURVE server: libzmq asks `Authenticator` during each handshake (ZAP,
RFC 27), and no frame of a peer whose key is not on the list of the socket gets past it. A peer is known by its ZeroMQ
identity, and a peer that dials again under its identity takes the old connection's place (ROUTER_HANDOVER).
At RECEIVE_HWM frames libzmq stops reading that peer's TCP stream, and the peer's own queue fills. A frame for a peer
that has SEND_HWM waiting, or is not connected, is dropped and counted.

libzmq's descriptor is edge-triggered: it signals once, and any call on the socket may swallow the signal. So a wakeup
reads until nothing is left, and every send is followed by one more read.

A frame that cannot be decoded is counted and dropped, and so is a message that the ledger finds impossible.

Agents: an agent's ZeroMQ identity proves its engine's name (`polyrl.wire.engine_identity`): nobody without that
proof takes the engine's place here, or reads what is sent to it; who proves no name is fenced, and what it sends is not
read. So is another process with the same proof, a stolen one maybe, until the first has ended or been silent for its
lease: the one that takes over is a successor then, and the other has to wait in its turn. A Hello under another name
is dropped. A peer whose queue is full has not read for longer than any lease: it is
treated as gone, so the ledger moves its samples, and it is fenced should it send again.

Trainer: there is one, the one that greeted last. A peer that has not greeted is answered by Fenced. When another
trainer greets, the one before is fenced for good: two trainers must not share a ledger.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import structlog
import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

from polyrl import wire
from polyrl.control import bracketed, may_be_ipv6
from polyrl.errors import ProtocolError
from polyrl.keys import ManagerKeys
from polyrl.sample import Pool
from polyrl.wire.engine_identity import IN_USE, NOT_RESERVED, REVOKED, UNPROVEN, is_reserved, proven_engine
from polyrl_rollout.manager.journal import RevokedNames

RECEIVE_HWM: Final = 256
"""Frames of one peer that wait here; at one Deltas per 50 ms that is 12 s of a stalled manager."""
SEND_HWM: Final = 70_000
"""Frames that wait for one peer; above the 65,536 assignments that the largest engine takes at once."""
HANDSHAKE_MS: Final = 5_000
"""A TCP connection that has not finished its CURVE handshake by then is closed, so strangers cannot pile up."""
BACKLOG: Final = 1_024
"""TCP connections that wait for accept: a whole fleet that reconnects at once."""
FRAMES_PER_WAKEUP: Final = 256
"""Frames handled before other callbacks of the loop get their turn."""
READ_S: Final = 0.02
"""Seconds after which they get it as well: a frame that is legal, and the dearest to decide, takes up to 0.1 s."""
DOUBLE_LOG_S: Final = 60.0
"""Between two log lines about an engine that two processes speak for."""
DOUBLE_TRIES_S: Final = 10.0
"""Longest between two tries of one that waits: agents dial anew every two seconds at the slowest."""
REPLACED_KEPT: Final = 64
"""Identities of replaced trainers that are remembered; each restart of a trainer makes one."""

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
    ) -> None:
        """`domain`: the ZAP domain whose one admitted key guards the socket; a peer that sends a larger frame than
        `frame_bytes` is disconnected."""
        self.traffic = Traffic()
        self._socket = context.socket(zmq.ROUTER)
        _configure(self._socket, keys, domain)
        self._socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes)
        endpoint = f"tcp://{bracketed(address)}:{port or '*'}"
        self._socket.ipv6 = may_be_ipv6(endpoint)
        self._socket.bind(endpoint)
        self.endpoint: str = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop = asyncio.get_running_loop()
        self._handler: FrameHandler | None = None
        self._read_planned = False
        self._skips = False
        """The rest of a message of too many parts is still to be read."""

    def start(self, handler: FrameHandler, idle: Callable[[], None]) -> None:
        """Hands each frame to `handler`; calls `idle` after every batch."""
        self._handler = handler
        self._idle = idle
        self._loop.add_reader(self._descriptor, self._read)
        self._plan_read()

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

    def close(self, linger_s: float) -> None:
        """Stops reading; gives queued frames `linger_s` to leave."""
        if self._handler is not None:
            self._loop.remove_reader(self._descriptor)
            self._handler = None
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
        part = receive(zmq.DONTWAIT)
        if not self._skips:
            identity, part = part, receive(zmq.DONTWAIT)  # libzmq gives a message whole or not at all
        more = bool(self._socket.rcvmore)
        if self._skips or more:
            traffic.frames_in += not self._skips
            traffic.dropped["parts"] += not self._skips
            self._skips = more
            return None
        traffic.frames_in += 1
        traffic.bytes_in += len(part)
        return identity, part


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


@dataclass
class _Double:
    """A process that shows the proof of an engine for which another one speaks; seconds of a monotonic clock."""

    since: float
    tried_at: float = -math.inf
    logged_at: float = -math.inf


class AgentSessions:
    """Between the agents' ROUTER and the ledger."""

    def __init__(
        self,
        router: Router,
        on_message: Callable[[str, wire.FromAgent], None],
        identity_key: str,
        *,
        lease_s: float,
        revoked: RevokedNames,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`identity_key`: proofs of names are made with it. After `lease_s` without a frame another process of an agent
        may take its place."""
        self._router, self._on_message, self._identity_key = router, on_message, identity_key
        self._lease_s, self._revoked, self._now = lease_s, revoked, now
        self._engines: dict[bytes, str] = {}
        """By ZeroMQ identity: engines of peers that have proved their names, one each."""
        self._identities: dict[str, bytes] = {}
        self._frames_at: dict[str, float] = {}
        """By engine: when its last frame came; absent once it has taken its leave."""
        self._doubles: dict[str, _Double] = {}
        """By engine."""
        self.delta_bytes = 0
        """Bytes of all Deltas frames received."""

    def on_frame(self, identity: bytes, frame: bytes) -> None:
        """Takes one frame of one peer."""
        dropped = self._router.traffic.dropped
        engine = self._engines.get(identity) or self._admitted(identity)
        if engine is None:
            return
        self._frames_at[engine] = self._now()
        try:
            message = wire.decode_from_agent(frame)
        except ProtocolError:
            dropped["undecodable"] += 1
            return
        if isinstance(message, wire.Hello) and message.engine != engine:
            dropped["identity"] += 1
            return
        if isinstance(message, wire.Hello) and message.pool is Pool.RESERVED and not self._is_reserved(identity):
            # What is reserved is never lost, and does not pause when its tokens depart from the fleet's.
            dropped["identity"] += 1
            self._router.send(identity, wire.encode(wire.Fenced(NOT_RESERVED)))
            return
        if isinstance(message, wire.Deltas):
            self.delta_bytes += len(frame)
        if isinstance(message, wire.Deregister):
            del self._frames_at[engine]
        self._deliver(engine, message)

    def send_all(self, messages: Sequence[tuple[str, wire.ToAgent]]) -> None:
        """Queues messages, each for the engine named beside it. Of several TokensKept for one engine only the last is
        sent: it covers the others, and a message costs more than the bookkeeping of the tokens that it answers."""
        newest = {engine: message for engine, message in messages if isinstance(message, wire.TokensKept)}
        for engine, message in messages:
            if not isinstance(message, wire.TokensKept) or newest[engine] is message:
                self.send(engine, message)

    def send(self, engine: str, message: wire.ToAgent) -> None:
        """Queues a message for an agent. One that is not connected is left to its lease."""
        identity = self._identities.get(engine)
        if identity is None:
            return
        sent = self._router.send(identity, wire.encode(message))
        if sent is Sent.FULL and not isinstance(message, wire.Fenced):
            log.warning("agent does not read; given up", engine=engine)
            self._deliver(engine, wire.Deregister("its queue at the manager is full"))

    def revoke(self, engine: str) -> None:
        """Its pod is gone: what it runs moves, and whoever proves its name from now on is refused. Raises OSError."""
        self._revoked.add(engine)
        self._engines.pop(self._identities.pop(engine, b""), None)
        self._frames_at.pop(engine, None)
        self._deliver(engine, wire.Deregister(REVOKED))

    def _is_reserved(self, identity: bytes) -> bool:
        return is_reserved(identity, self._identity_key)

    def _admitted(self, identity: bytes) -> str | None:
        """The engine that this new peer may speak for; the reason why it may for none goes to it."""
        engine = proven_engine(identity, self._identity_key)
        if engine is None:
            self._router.traffic.dropped["identity"] += 1
            self._router.send(identity, wire.encode(wire.Fenced(UNPROVEN)))
            return None
        if engine in self._revoked:
            self._router.traffic.dropped["revoked"] += 1
            self._router.send(identity, wire.encode(wire.Fenced(REVOKED)))
            return None
        now = self._now()
        if now - self._frames_at.get(engine, -math.inf) < self._lease_s:
            self._router.traffic.dropped["double"] += 1
            self._name_double(engine, now)
            self._router.send(identity, wire.encode(wire.Fenced(IN_USE, lease_over=True)))
            return None
        self._engines.pop(self._identities.get(engine, b""), None)
        self._engines[identity] = engine
        self._identities[engine] = identity
        return engine

    def _name_double(self, engine: str, now: float) -> None:
        double = self._doubles.setdefault(engine, _Double(since=now))
        if now - double.tried_at >= DOUBLE_TRIES_S:
            double.since = now
        double.tried_at = now
        if now - double.logged_at >= DOUBLE_LOG_S:
            double.logged_at = now
            log.warning("another process has this engine's proof; it waits for the first", engine=engine)

    def waits(self) -> list[tuple[str, float]]:
        """Engines for which a second process tries to speak, and for how many seconds it has."""
        now = self._now()
        trying = ((engine, double) for engine, double in self._doubles.items())
        return [(engine, now - double.since) for engine, double in trying if now - double.tried_at < DOUBLE_TRIES_S]

    def _deliver(self, engine: str, message: wire.FromAgent) -> None:
        try:
            self._on_message(engine, message)
        except ProtocolError as error:
            self._router.traffic.dropped["impossible"] += 1
            log.warning("impossible message", engine=engine, error=str(error))


class TrainerSession:
    """Between the trainer's ROUTER and the ledger."""

    def __init__(self, router: Router, decide: Callable[[wire.FromTrainer], Iterable[wire.ToTrainer]]) -> None:
        """`decide` gives the ledger's answers to a greeting unsent, so that a refused one goes to its sender."""
        self._router, self._decide = router, decide
        self._trainer: bytes | None = None
        self._replaced: deque[bytes] = deque(maxlen=REPLACED_KEPT)

    @property
    def connected(self) -> bool:
        """True once a trainer has greeted."""
        return self._trainer is not None

    def on_frame(self, identity: bytes, frame: bytes) -> None:
        """Takes one frame of one peer."""
        try:
            message = wire.decode_from_trainer(frame)
        except ProtocolError:
            self._router.traffic.dropped["undecodable"] += 1
            return
        if isinstance(message, wire.TrainerHello):
            self._greet(identity, message)
        elif identity != self._trainer:
            self._router.send(identity, wire.encode(wire.Fenced("this trainer has not greeted, or another has since")))
        else:
            self._deliver(message)

    def send(self, messages: Iterable[wire.ToTrainer]) -> None:
        """Queues messages for the trainer; without one they are dropped, and sent again when one greets."""
        for message in messages:
            if self._trainer is not None:
                self._router.send(self._trainer, wire.encode(message))

    def _greet(self, identity: bytes, hello: wire.TrainerHello) -> None:
        if identity in self._replaced:
            self._router.send(identity, wire.encode(wire.Fenced(wire.SUPERSEDED)))
            return
        answers = list(self._decide(hello))
        if any(isinstance(answer, wire.Fenced) for answer in answers):
            for answer in answers:
                self._router.send(identity, wire.encode(answer))
            return
        if self._trainer not in (None, identity):
            log.warning("a new trainer takes over")
            self._replaced.append(self._trainer)
        self._trainer = identity
        self.send(answers)

    def _deliver(self, message: wire.FromTrainer) -> None:
        try:
            self.send(self._decide(message))
        except ProtocolError as error:
            self._router.traffic.dropped["impossible"] += 1
            log.warning("impossible message of the trainer", error=str(error))
