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
from collections.abc import Mapping
from enum import Enum
from typing import Final

from polyrl import wire
from polyrl.ledger.events import Moved, TurnEnded
from polyrl.ledger.transition import Effects
from polyrl.wire import ToAgent, ToTrainer


class Safety(Enum):
    """What a message waits for, beyond the commit of its events."""

    COMMITTED = "committed"
    """Nothing: a sign of life, or an order that is given anew after a restart. It only keeps its place among the
    messages to its peer."""
    RECEIPT = "receipt"
    """The disk, if an assignment has ended in its commit, or any promise waits. An agent holds a turn's tokens to its
    end, and its greeting restores what a power cut took; with the end it forgets them. So tokens alone cost no sync."""
    SYNCED = "synced"
    """The disk, soon: somebody waits for it."""


NEEDS: Final[Mapping[type[ToAgent | ToTrainer], Safety]] = {
    # Settled by the greeting that follows any break of the connection.
    wire.Welcome: Safety.COMMITTED,
    wire.Resend: Safety.COMMITTED,
    wire.Recall: Safety.COMMITTED,
    wire.GoToSleep: Safety.COMMITTED,
    wire.WakeUp: Safety.COMMITTED,
    wire.TrainerHeartbeat: Safety.COMMITTED,
    # Sent by sessions, which ask the ledger for nothing; whole again after each greeting.
    wire.Peers: Safety.COMMITTED,
    # A measure: nobody relies on it.
    wire.VersionServed: Safety.COMMITTED,
    # Names only; what they stand for is fetched, and that waits.
    wire.TurnsAwaited: Safety.COMMITTED,
    wire.Fetched: Safety.COMMITTED,
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
    wire.FetchedText: Safety.SYNCED,
    wire.Batch: Safety.SYNCED,
    wire.Late: Safety.SYNCED,
    wire.GroupDropped: Safety.SYNCED,
}

ENDS: Final = (Moved, TurnEnded)
"""Events with which an assignment ends, and its agent's need to hold what it sent."""

TRAINER_PEER: Final = ""
"""The trainer among the peers; no engine has an empty name."""


class Outbox:
    """Messages on their way out, until what they rest on is safe enough."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, str, ToAgent | ToTrainer]] = deque()
        """Number of the commit, peer, message; in order."""
        self._promises: Counter[str] = Counter()
        """Per peer: messages that wait and keep later ones back."""
        self._ready = Effects()

    @property
    def waits(self) -> bool:
        """Whether anything waits for the disk."""
        return bool(self._waiting)

    def put(self, commit: int, effects: Effects) -> None:
        """What was gathered for `commit`, which never falls; without events what rests on commits up to it."""
        receipts: list[tuple[str, ToAgent]] = []
        for engine, message in effects.to_agents:
            if NEEDS[type(message)] is Safety.RECEIPT:
                receipts.append((engine, message))
            else:
                self._put(commit, engine, message)
        for answer in effects.to_trainer:
            self._put(commit, TRAINER_PEER, answer)
        # Only now: what one of them waits for may be a promise to the trainer.
        waits = bool(self._waiting) or any(isinstance(event, ENDS) for event in effects.events)
        for engine, message in receipts:
            if waits:
                self._waiting.append((commit, engine, message))
            else:
                self._ready.to_agents.append((engine, message))

    def take(self, synced: int) -> Effects:
        """What may leave now that commits up to `synced` are on the disk."""
        while self._waiting and self._waiting[0][0] <= synced:
            _, peer, message = self._waiting.popleft()
            if NEEDS[type(message)] is not Safety.RECEIPT:
                self._promises[peer] -= 1
                if not self._promises[peer]:
                    del self._promises[peer]
            self._release(peer, message)
        ready, self._ready = self._ready, Effects()
        return ready

    def _put(self, commit: int, peer: str, message: ToAgent | ToTrainer) -> None:
        if NEEDS[type(message)] is Safety.COMMITTED and peer not in self._promises:
            self._release(peer, message)
        else:
            self._waiting.append((commit, peer, message))
            self._promises[peer] += 1

    def _release(self, peer: str, message: ToAgent | ToTrainer) -> None:
        if peer == TRAINER_PEER:
            self._ready.to_trainer.append(message)  # type: ignore[arg-type]
        else:
            self._ready.to_agents.append((peer, message))  # type: ignore[arg-type]
