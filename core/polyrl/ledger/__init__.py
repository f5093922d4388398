"""The ledger: every prompt, sample and token of a run, as a state machine of values.

    input -> decider (reads) -> events -> fold (changes the state)
                             -> messages to agents and trainer

Whoever keeps the events keeps the run: `fold.replay` rebuilds the state from them. Read next: `ledger`.
"""

from __future__ import annotations

from polyrl.ledger.config import LedgerConfig
from polyrl.ledger.events import Event
from polyrl.ledger.ledger import Ledger
from polyrl.ledger.status import LedgerStatus
from polyrl.ledger.transition import Effects
from polyrl.ledger.waits import Wait

__all__ = ["Effects", "Event", "Ledger", "LedgerConfig", "LedgerStatus", "Wait"]
