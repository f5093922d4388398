"""The ledger: every prompt, sample and token of a run, as a state machine of values.

    input -> decider (reads) -> facts -> fold (changes the state)
                             -> messages to agents and trainer

Whoever keeps the facts keeps the run: `fold.replay` rebuilds the state from them. Read next: `ledger`.
"""

from __future__ import annotations

from polyrl.ledger.config import LedgerConfig
from polyrl.ledger.decision import Outcome
from polyrl.ledger.events import Fact
from polyrl.ledger.ledger import Ledger
from polyrl.ledger.status import LedgerStatus
from polyrl.ledger.waits import Wait

__all__ = ["Fact", "Ledger", "LedgerConfig", "LedgerStatus", "Outcome", "Wait"]
