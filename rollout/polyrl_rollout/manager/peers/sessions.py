"""What the manager lets peers say: the agents' sessions, and the trainer's one.

A frame that cannot be decoded is counted and dropped, and so is a message that the ledger finds impossible. A peer of
another wire version reads so in its own.

Agents: an agent's ZeroMQ identity proves its engine's name (`polyrl.wire.engine_identity`): nobody without that
proof takes the engine's place here, or reads what is sent to it; who proves no name is fenced, and what it sends is not
read. So is another process with the same proof, a stolen one maybe, until the first has ended or been silent for its
lease: the one that takes over is a successor then, and the other has to wait in its turn. A Hello under another name
is dropped. A peer whose queue is full has not read for longer than any lease: it is
treated as gone, so the ledger moves its samples, and it is fenced should it send again. Who is welcome hears of the
others that give and take chunks of weights (`polyrl.wire.roster`), and they of it, until it is gone.

Trainer: there is one, the one that greeted last. A peer that has not greeted is answered by Fenced. When another
trainer greets, the one before is fenced for good: two trainers must not share a ledger.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from polyrl import wire
from polyrl.errors import ProtocolError
from polyrl.sample import Pool
from polyrl.wire.engine_identity import IN_USE, NOT_RESERVED, REVOKED, UNPROVEN, is_reserved, proven_engine
from polyrl.wire.roster import Roster, peer_of
from polyrl_rollout.manager.journal import RevokedNames
from polyrl_rollout.manager.peers.router import Router, Sent

DOUBLE_LOG_S: Final = 60.0
"""Between two log lines about an engine that two processes speak for."""
DOUBLE_TRIES_S: Final = 10.0
"""Longest between two tries of one that waits: agents dial anew every two seconds at the slowest."""
GREETINGS_AT_ONCE: Final = 30
"""Greetings of one engine at once: an honest agent whose manager comes and goes, or refuses it, greets half as often
before it pauses for longest."""
GREETINGS_PER_S: Final = 1.0
"""After those: twice what an agent needs that is refused for ever."""
NAMED_LIARS: Final = 4
"""In one line of the log, of the thousand that a message may name."""
REPLACED_KEPT: Final = 64
"""Identities of replaced trainers that are remembered; each restart of a trainer makes one."""

log = structlog.get_logger(__name__)


@dataclass
class _Double:
    """A process that shows the proof of an engine for which another one speaks; seconds of a monotonic clock."""

    since: float
    tried_at: float = -math.inf
    logged_at: float = -math.inf


@dataclass
class _Greetings:
    """How many greetings of one engine are taken. One that says something new is kept in the journal and its history
    for good, so whoever greets without end would fill the disk."""

    left: float = GREETINGS_AT_ONCE
    at: float = -math.inf

    def take(self, now: float) -> bool:
        """Whether one more is taken, `now` of a monotonic clock, in seconds."""
        self.left = min(GREETINGS_AT_ONCE, self.left + (now - self.at) * GREETINGS_PER_S)
        self.at = now
        taken = self.left >= 1.0
        self.left -= taken
        return taken


@dataclass
class ReceivedWeights:
    """What engines say they received, since the manager began."""

    of_publisher: int = 0
    """Bytes."""
    of_peers: int = 0
    """Bytes."""
    false_chunks: int = 0
    """How many chunks engines refused of each other."""


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
        self._greetings: dict[str, _Greetings] = {}
        """By engine; kept when it is gone, for it may come back."""
        self._greeted: dict[str, wire.Peer | None] = {}
        """By engine: how others would know it, by its last greeting."""
        self._warned: Counter[tuple[str, str]] = Counter()
        """How often, by what was said and the engine."""
        self.roster = Roster()
        self.delta_bytes = 0
        """Bytes of all Deltas frames received."""
        self.weights = ReceivedWeights()

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
            self._router.refuse(identity, frame, may_pass=False)
            return
        if isinstance(message, wire.Hello) and message.engine != engine:
            dropped["identity"] += 1
            return
        if isinstance(message, wire.Hello) and message.pool is Pool.RESERVED and not self._is_reserved(identity):
            # What is reserved is never lost, and does not pause when its tokens depart from the fleet's.
            dropped["identity"] += 1
            self._router.send(identity, wire.encode(wire.Fenced(NOT_RESERVED)))
            return
        if isinstance(message, wire.Hello) and not self._greetings.setdefault(engine, _Greetings()).take(self._now()):
            # An honest agent asks again when nobody answers it.
            dropped["greetings"] += 1
            return
        if isinstance(message, wire.Hello):
            self._greeted[engine] = peer_of(message, self._router.sender_host())
        if isinstance(message, wire.Deltas):
            self.delta_bytes += len(frame)
        if isinstance(message, wire.WeightsLoaded):
            self._count_weights(engine, message)
        if isinstance(message, wire.Deregister):
            del self._frames_at[engine]
        self._deliver(engine, message)

    def _count_weights(self, engine: str, loaded: wire.WeightsLoaded) -> None:
        """What one engine says of others moves nobody: it may be the liar."""
        of_peers = min(max(0, loaded.bytes_from_peers), max(0, loaded.bytes_pulled))
        self.weights.of_peers += of_peers
        self.weights.of_publisher += max(0, loaded.bytes_pulled) - of_peers
        if loaded.liars:
            self.weights.false_chunks += len(loaded.liars)
            self._warn("an agent says that others gave it false chunks", engine, liars=loaded.liars[:NAMED_LIARS])

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
        if isinstance(message, wire.Welcome):
            self.roster.welcome(engine, self._greeted.get(engine))
        if sent is Sent.FULL and not isinstance(message, wire.Fenced):
            log.warning("agent does not read; given up", engine=engine)
            self._deliver(engine, wire.Deregister("its queue at the manager is full"))

    def send_roster(self) -> None:
        """Sends the news of who gives and takes chunks of weights."""
        for engine, message in self.roster.messages():
            self.send(engine, message)

    def gone(self, engine: str) -> None:
        """The ledger has given it up."""
        self._greeted.pop(engine, None)
        self.roster.remove(engine)

    def revoke(self, engine: str) -> None:
        """Its pod is gone: what it runs moves, and whoever proves its name from now on is refused. Raises OSError."""
        self._revoked.add(engine)
        self.gone(engine)
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
            self._warn("impossible message", engine, error=str(error))

    def _warn(self, event: str, engine: str, **what: object) -> None:
        """Logs the first, second, fourth, eighth... of an engine's occasions: the log is not its to fill."""
        self._warned[event, engine] += 1
        times = self._warned[event, engine]
        if times & (times - 1) == 0:
            log.warning(event, engine=engine, times=times, **what)


class TrainerSession:
    """Between the trainer's ROUTER and the ledger."""

    def __init__(
        self,
        router: Router,
        decide: Callable[[wire.FromTrainer], Iterable[wire.ToTrainer]],
        on_fetch: Callable[[wire.FetchReport], None],
    ) -> None:
        """`decide` gives the ledger's answers to a greeting unsent, so that a refused one goes to its sender;
        `on_fetch` takes what comes before there is a trainer."""
        self._router, self._decide, self._on_fetch = router, decide, on_fetch
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
            self._router.refuse(identity, frame, may_pass=True)
            return
        if isinstance(message, wire.FetchReport):
            self._on_fetch(message)
        elif isinstance(message, wire.TrainerHello):
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
