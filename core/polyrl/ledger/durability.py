"""Which messages must wait for the disk: what somebody was promised must survive a power cut.

An event is safe twice: `committed`, it outlives this process (the system's cache has it); `synced`, it outlives the
machine. A message never leaves before its events are committed. Whether it also waits until they are synced says
`NEEDS`, by what its receiver does on the strength of it: one that forgets something, uses a number, or takes a question
for settled, must be able to rely on our memory.

    commit 7 -> messages that rest on it: put(7, ...) -> synced to 7 -> take(7) -> they leave, in order per peer

One fsync covers all commits before it, so many messages share one (group commit).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final

from polyrl import wire
from polyrl.wire import ToAgent, ToTrainer


class Safety(Enum):
    """What a message waits for, beyond the commit of its events."""

    COMMITTED = "committed"
    """Nothing: a sign of life, or an order that is given anew after a restart. It only keeps its place among the
    messages to its peer."""
    RECEIPT = "receipt"
    """The disk, as long as any promise does. An agent holds a turn's tokens to its end, and its greeting restores what
    a power cut took; only with the end, whose TurnDone is a promise, it forgets them. So tokens alone cost no fsync."""
    SYNCED = "synced"
    """The disk, soon: somebody waits for it."""


NEEDS: Final[Mapping[type[ToAgent | ToTrainer], Safety]] = {
    # Settled by the greeting that follows any break of the connection.
    wire.Welcome: Safety.COMMITTED,
    wire.Resend: Safety.COMMITTED,
    wire.Recall: Safety.COMMITTED,
    wire.TrainerHeartbeat: Safety.COMMITTED,
    # The agent forgets samples that have ended.
    wire.TokensKept: Safety.RECEIPT,
    # The agent forgets all of an assignment, or of all.
    wire.Cancel: Safety.SYNCED,
    wire.Fenced: Safety.SYNCED,
    # Its number: a restarted ledger that gave it again would take one sample's tokens for another's.
    wire.Assign: Safety.SYNCED,
    # An engine must not serve a version, nor end, of which a restarted ledger knows nothing.
    wire.Announce: Safety.SYNCED,
    wire.StartDrain: Safety.SYNCED,
    # The trainer takes what it asked for as done, and does not ask again; it judges and trains these very tokens.
    wire.TrainerWelcome: Safety.SYNCED,
    wire.Accepted: Safety.SYNCED,
    wire.Declined: Safety.SYNCED,
    wire.TurnDone: Safety.SYNCED,
    wire.Batch: Safety.SYNCED,
    wire.Late: Safety.SYNCED,
    wire.GroupDropped: Safety.SYNCED,
}

TRAINER_PEER: Final = ""
"""The trainer among the peers; no engine has an empty name."""


class Outbox:
    """Messages on their way out, until what they rest on is safe enough."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, str, ToAgent | ToTrainer]] = deque()
        """Number of the commit, peer, message; in order."""
        self._promises: Counter[str] = Counter()
        """Per peer: those that wait and keep later ones back, all but receipts."""
        self._to_agents: list[tuple[str, ToAgent]] = []
        self._to_trainer: list[ToTrainer] = []

    @property
    def waits(self) -> bool:
        """Whether anything waits for the disk."""
        return bool(self._promises)

    def put(self, commit: int, to_agents: Iterable[tuple[str, ToAgent]], to_trainer: Iterable[ToTrainer]) -> None:
        """Messages that rest on commits up to `commit`, which never falls."""
        receipts: list[tuple[str, ToAgent]] = []
        for engine, message in to_agents:
            if NEEDS[type(message)] is Safety.RECEIPT:
                receipts.append((engine, message))
            else:
                self._put(commit, engine, message)
        for answer in to_trainer:
            self._put(commit, TRAINER_PEER, answer)
        # Only now: the promise that one of them waits for may go to the trainer.
        for engine, message in receipts:
            if self._promises:
                self._waiting.append((commit, engine, message))
            else:
                self._release(engine, message)

    def take(self, synced: int) -> tuple[list[tuple[str, ToAgent]], list[ToTrainer]]:
        """What may leave now that commits up to `synced` are on the disk."""
        while self._waiting and (self._waiting[0][0] <= synced or not self._promises):
            _, peer, message = self._waiting.popleft()
            if NEEDS[type(message)] is not Safety.RECEIPT:
                self._promises[peer] -= 1
                if not self._promises[peer]:
                    del self._promises[peer]
            self._release(peer, message)
        to_agents, self._to_agents = self._to_agents, []
        to_trainer, self._to_trainer = self._to_trainer, []
        return to_agents, to_trainer

    def _put(self, commit: int, peer: str, message: ToAgent | ToTrainer) -> None:
        if NEEDS[type(message)] is Safety.COMMITTED and peer not in self._promises:
            self._release(peer, message)
        else:
            self._waiting.append((commit, peer, message))
            self._promises[peer] += 1

    def _release(self, peer: str, message: ToAgent | ToTrainer) -> None:
        if peer == TRAINER_PEER:
            self._to_trainer.append(message)  # type: ignore[arg-type]
        else:
            self._to_agents.append((peer, message))  # type: ignore[arg-type]
