"""The agents' side of the manager: decodes their frames, knows who speaks, sends them what the ledger decided.

An agent's ZeroMQ identity is its engine's name. A frame that cannot be decoded, or whose sender calls itself by another
name, is counted and dropped. A peer whose queue is full has not read for longer than any lease: it is treated as gone,
so the ledger moves its samples, and it is fenced should it speak again.

Refuses to hold: decisions (the ledger's), connections (see `sockets`). Read next: `trainer_desk`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from polyrl.errors import ProtocolError
from polyrl.wire import Deltas, Deregister, Fenced, FromAgent, Hello, ToAgent, TokensKept, decode_from_agent, encode
from polyrl_rollout.manager.sockets import Router, Sent

ENGINE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
"""What an engine may be called; a pod UID fits, and so does a log line."""

log = structlog.get_logger(__name__)


class AgentsDesk:
    """Between the agents' ROUTER and the ledger."""

    def __init__(self, router: Router, on_message: Callable[[str, FromAgent], None]) -> None:
        self._router = router
        self._on_message = on_message
        self.delta_bytes = 0
        """Bytes of all Deltas frames received."""
        self.slow = 0
        """Agents given up because their queue was full."""

    def on_frame(self, identity: bytes, frame: bytes) -> None:
        """Takes one frame of one peer."""
        dropped = self._router.traffic.dropped
        try:
            message = decode_from_agent(frame)
            engine = identity.decode("ascii")
        except ProtocolError:
            dropped["undecodable"] += 1
            return
        except UnicodeDecodeError:
            dropped["identity"] += 1
            return
        if isinstance(message, Hello) and not _is_self(message, engine):
            dropped["identity"] += 1
            return
        if isinstance(message, Deltas):
            self.delta_bytes += len(frame)
        self._say(engine, message)

    def send_all(self, messages: Sequence[tuple[str, ToAgent]]) -> None:
        """Queues messages, each for the engine named beside it. Of several TokensKept for one engine only the last is
        sent: it covers the others, and a message costs more than the bookkeeping of the tokens that it answers."""
        newest = {engine: message for engine, message in messages if isinstance(message, TokensKept)}
        for engine, message in messages:
            if not isinstance(message, TokensKept) or newest[engine] is message:
                self.send(engine, message)

    def send(self, engine: str, message: ToAgent) -> None:
        """Queues a message for an agent. One that is not connected is left to its lease."""
        sent = self._router.send(engine.encode(), encode(message))
        if sent is Sent.FULL and not isinstance(message, Fenced):
            self.slow += 1
            log.warning("agent does not read; given up", engine=engine)
            self._say(engine, Deregister("its queue at the manager is full"))

    def _say(self, engine: str, message: FromAgent) -> None:
        try:
            self._on_message(engine, message)
        except ProtocolError as error:
            self._router.traffic.dropped["impossible"] += 1
            log.warning("impossible message", engine=engine, error=str(error))


def _is_self(hello: Hello, engine: str) -> bool:
    return hello.engine == engine and ENGINE_NAME.fullmatch(engine) is not None
