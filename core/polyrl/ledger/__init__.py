"""The ledger: every prompt, sample and token of a run, as a state machine of values.

    input -> rules (read the state) -> events -> apply (changes the state)
                                    -> messages to agents and trainer

    messages      what each message of an agent or of the trainer leads to
    scheduling    which engine generates what: placement, moves, recalls, leases
    batching      which groups are discarded, which answer a batch request
    journal       events and state as bytes, rows and pages; old schemas; which messages wait for the disk
    audit         an independent check of a run's history
    apply         how each event changes the state
    measures      lengths of turns and time of engines, as folds that the state holds

Each imports only what stands below it; `ledger` stands above all. Whoever keeps the events keeps the run:
applied again they give the same state.
"""

from __future__ import annotations

from polyrl.ledger.config import LedgerConfig
from polyrl.ledger.events import Event
from polyrl.ledger.ledger import Ledger
from polyrl.ledger.status import Wait
from polyrl.ledger.transition import Effects

__all__ = ["Effects", "Event", "Ledger", "LedgerConfig", "Wait"]
