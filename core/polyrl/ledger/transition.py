"""One input on its way through the rules: they read the state, record events, and address messages.

`record` applies at once, so a rule sees the consequences of what it has decided; it never changes the state itself.
"""

from __future__ import annotations

from polyrl.ledger.apply import apply
from polyrl.ledger.config import LedgerConfig
from polyrl.ledger.events import EngineDraining, Event, FollowUp, Ignored, WindowSet
from polyrl.ledger.fleet import Fleet
from polyrl.ledger.state import LedgerState
from polyrl.wire import ToAgent, ToTrainer


class Effects:
    """What one input led to, in order. Send nothing before the events are as safe as they are meant to be."""

    __slots__ = ("events", "to_agents", "to_trainer")

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.to_agents: list[tuple[str, ToAgent]] = []
        """Engine name and message."""
        self.to_trainer: list[ToTrainer] = []

    @property
    def forces_moves(self) -> bool:
        """What runs somewhere must leave from now on: devices are the trainer's, or an engine is about to go."""
        return any(isinstance(event, WindowSet | EngineDraining) for event in self.events)


class Transition:
    """The state to read, the moment, and the effects so far."""

    __slots__ = ("effects", "fleet", "follow_ups", "now", "requeued", "state")

    def __init__(self, state: LedgerState, now: float, fleet: Fleet | None = None) -> None:
        """`fleet`: the state's, if its owner keeps one."""
        self.state = state
        self.fleet = Fleet(state) if fleet is None else fleet
        self.now = now
        self.effects = Effects()
        self.follow_ups = FollowUp.NONE
        self.requeued: list[int] = []
        """Groups of which a sample waits, newly or again."""

    @property
    def config(self) -> LedgerConfig:
        return self.state.config

    def record(self, event: Event) -> None:
        """Decides `event`."""
        self.effects.events.append(event)
        self.fleet.note(event)
        apply(self.state, event)
        if event.follow_up:
            self.follow_ups |= event.follow_up

    def send(self, engine: str, message: ToAgent) -> None:
        """To one agent."""
        self.effects.to_agents.append((engine, message))

    def answer(self, message: ToTrainer) -> None:
        """To the trainer."""
        self.effects.to_trainer.append(message)

    def ignore(self, kind: str) -> None:
        """A message had no effect."""
        self.record(Ignored(kind))
