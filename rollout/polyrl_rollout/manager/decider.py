"""What the manager needs of the ledger, as a type: `polyrl.ledger.Ledger` fits it, and so does a test's fake.

Refuses to hold: any rule. Read next: `polyrl.ledger`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from polyrl.status import ManagerStatus
from polyrl.wire import FromAgent, FromTrainer, ToAgent, ToTrainer


class Outcome(Protocol):
    """What one message, or the passing of time, led to."""

    @property
    def facts(self) -> Sequence[object]:
        """What is true now and was not before; a journal keeps these."""
        ...

    @property
    def to_agents(self) -> Iterable[tuple[str, ToAgent]]: ...

    @property
    def to_trainer(self) -> Iterable[ToTrainer]: ...


class Decider(Protocol):
    """Facts and `now` (seconds on a clock that never goes back) in, outcomes out."""

    def from_agent(self, engine: str, message: FromAgent, now: float) -> Outcome: ...

    def from_trainer(self, message: FromTrainer, now: float) -> Outcome: ...

    def tick(self, now: float) -> Outcome:
        """Does what is due by `now`."""
        ...

    def next_due(self) -> float | None:
        """When `tick` has something to do; None: not before the next message."""
        ...

    def drain(self, engine: str, deadline_s: float, reason: str, now: float) -> Outcome: ...

    def status(self, now: float) -> ManagerStatus: ...

    def waits(self, now: float) -> Sequence[object]:
        """Each prints as a sentence."""
        ...
