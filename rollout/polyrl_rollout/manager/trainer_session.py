"""The trainer's side of the manager: one trainer at a time, the one that greeted last.

A frame that cannot be decoded is counted and dropped. A frame of a peer that has not greeted is answered by Fenced.
When another trainer greets, it takes over, and the one before is fenced for good: two trainers must not share a ledger.

Refuses to hold: decisions (the ledger's). Read next: `server`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from polyrl.errors import ProtocolError
from polyrl.wire import SUPERSEDED, Fenced, FromTrainer, ToTrainer, TrainerHello, decode_from_trainer, encode
from polyrl_rollout.manager.sockets import Router

REPLACED_KEPT: Final = 64
"""Identities of replaced trainers that are remembered; each restart of a trainer makes one."""

log = structlog.get_logger(__name__)


class TrainerDesk:
    """Between the trainer's ROUTER and the ledger."""

    def __init__(self, router: Router, decide: Callable[[FromTrainer], Iterable[ToTrainer]]) -> None:
        """`decide` gives the ledger's answers to a greeting unsent, so that a refused one goes to its sender."""
        self._router = router
        self._decide = decide
        self._trainer: bytes | None = None
        self._replaced: deque[bytes] = deque(maxlen=REPLACED_KEPT)

    @property
    def connected(self) -> bool:
        """True once a trainer has greeted."""
        return self._trainer is not None

    def on_frame(self, identity: bytes, frame: bytes) -> None:
        """Takes one frame of one peer."""
        try:
            message = decode_from_trainer(frame)
        except ProtocolError:
            self._router.traffic.dropped["undecodable"] += 1
            return
        if isinstance(message, TrainerHello):
            self._greet(identity, message)
        elif identity != self._trainer:
            self._router.send(identity, encode(Fenced("this trainer has not greeted, or another has since")))
        else:
            self._hear(message)

    def send(self, messages: Iterable[ToTrainer]) -> None:
        """Queues messages for the trainer; without one they are dropped, and asked for again when one greets."""
        for message in messages:
            if self._trainer is not None:
                self._router.send(self._trainer, encode(message))

    def _greet(self, identity: bytes, hello: TrainerHello) -> None:
        if identity in self._replaced:
            self._router.send(identity, encode(Fenced(SUPERSEDED)))
            return
        answers = list(self._decide(hello))
        if any(isinstance(answer, Fenced) for answer in answers):
            for answer in answers:
                self._router.send(identity, encode(answer))
            return
        if self._trainer not in (None, identity):
            log.warning("a new trainer takes over")
            self._replaced.append(self._trainer)
        self._trainer = identity
        self.send(answers)

    def _hear(self, message: FromTrainer) -> None:
        try:
            self.send(self._decide(message))
        except ProtocolError as error:
            self._router.traffic.dropped["impossible"] += 1
            log.warning("impossible message of the trainer", error=str(error))
