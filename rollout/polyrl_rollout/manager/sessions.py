"""Which frames of whom become messages to the ledger, and whose socket its messages go to.

A frame that cannot be decoded is counted and dropped, and so is a message that the ledger finds impossible.

Agents: an agent's ZeroMQ identity is its engine's name; a Hello under another name is dropped. A peer whose queue is
full has not read for longer than any lease: it is treated as gone, so the ledger moves its samples, and it is fenced
should it send again.

Trainer: there is one, the one that greeted last. A peer that has not greeted is answered by Fenced. When another
trainer greets, the one before is fenced for good: two trainers must not share a ledger.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import structlog

from polyrl import wire
from polyrl.errors import ProtocolError
from polyrl_rollout.manager.sockets import Router, Sent

ENGINE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
"""Names that an engine may have; a pod UID fits, and the name fits a log line."""
REPLACED_KEPT: Final = 64
"""Identities of replaced trainers that are remembered; each restart of a trainer makes one."""

log = structlog.get_logger(__name__)


class AgentSessions:
    """Between the agents' ROUTER and the ledger."""

    def __init__(self, router: Router, on_message: Callable[[str, wire.FromAgent], None]) -> None:
        self._router, self._on_message = router, on_message
        self.delta_bytes = 0
        """Bytes of all Deltas frames received."""

    def on_frame(self, identity: bytes, frame: bytes) -> None:
        """Takes one frame of one peer."""
        dropped = self._router.traffic.dropped
        try:
            message = wire.decode_from_agent(frame)
            engine = identity.decode("ascii")
        except ProtocolError:
            dropped["undecodable"] += 1
            return
        except UnicodeDecodeError:
            dropped["identity"] += 1
            return
        if isinstance(message, wire.Hello) and not (message.engine == engine and ENGINE_NAME.fullmatch(engine)):
            dropped["identity"] += 1
            return
        if isinstance(message, wire.Deltas):
            self.delta_bytes += len(frame)
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
        sent = self._router.send(engine.encode(), wire.encode(message))
        if sent is Sent.FULL and not isinstance(message, wire.Fenced):
            log.warning("agent does not read; given up", engine=engine)
            self._deliver(engine, wire.Deregister("its queue at the manager is full"))

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
