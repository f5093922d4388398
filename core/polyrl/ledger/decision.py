"""One input on its way through the deciders: they read the state, record facts, and address messages.

`record` folds at once, so a decider sees the consequences of what it has decided; it never changes the state itself.

Refuses to hold: rules. Read next: `deltas`, `agents`, `trainer`.
"""

from __future__ import annotations

from polyrl.ledger.apply.apply import fold
from polyrl.ledger.config import LedgerConfig
from polyrl.ledger.events import Effect, Fact, Ignored
from polyrl.ledger.state import State
from polyrl.wire import ToAgent, ToTrainer


class Outcome:
    """What one input led to, in order. Send nothing before the facts are as safe as they are meant to be."""

    __slots__ = ("facts", "to_agents", "to_trainer")

    def __init__(self) -> None:
        self.facts: list[Fact] = []
        self.to_agents: list[tuple[str, ToAgent]] = []
        """Engine name and message."""
        self.to_trainer: list[ToTrainer] = []


class Decision:
    """The state to read, the moment, and the outcome that grows."""

    __slots__ = ("effects", "now", "outcome", "requeued", "state")

    def __init__(self, state: State, now: float) -> None:
        self.state = state
        self.now = now
        self.outcome = Outcome()
        self.effects = Effect.NONE
        self.requeued: list[int] = []
        """Groups of which a sample waits again."""

    @property
    def config(self) -> LedgerConfig:
        return self.state.config

    def record(self, fact: Fact) -> None:
        """Decides `fact`."""
        self.outcome.facts.append(fact)
        fold(self.state, fact)
        if fact.effect:
            self.effects |= fact.effect

    def tell(self, engine: str, message: ToAgent) -> None:
        """To one agent."""
        self.outcome.to_agents.append((engine, message))

    def answer(self, message: ToTrainer) -> None:
        """To the trainer."""
        self.outcome.to_trainer.append(message)

    def ignore(self, kind: str) -> None:
        """A message had no effect."""
        self.record(Ignored(kind))
