"""What a restart may forget: signs of life, load, timers, what was asked for. Everything else must be there again, to
the last byte (I10).

Refuses to hold: how a restart is done (see `manager`). Read next: `invariants`.
"""

from __future__ import annotations

from math import inf

import msgspec

from polyrl.ledger.journal.codec import decode_state, encode_state
from polyrl.ledger.state import LedgerState


def lost_by_restart(before: LedgerState, after: LedgerState) -> list[str]:
    """Names of the parts of the state that differ beyond what a restarted manager learns anew."""
    kept, found = _without_signs_of_life(before), _without_signs_of_life(after)
    names = [field.name for field in msgspec.structs.fields(LedgerState)]
    return [name for name in names if getattr(kept, name) != getattr(found, name)]


def _without_signs_of_life(state: LedgerState) -> LedgerState:
    """A copy; what the events that are not durable say is set to one value."""
    copy = decode_state(encode_state(state))
    copy.due = copy.trainer_at = inf
    copy.counters.ignored.clear()
    for engine in copy.engines.values():
        engine.heard_at = engine.weights_at = inf
        engine.load = (0, 0, 0)
        engine.gaps.clear()
        engine.reserved_kv.clear()
        engine.recalled = 0
    for assignment in copy.assignments.values():
        assignment.progress_at = inf
        assignment.recall_cause, assignment.recall_target = None, ""
    for sample in copy.samples.values():
        sample.asks, sample.ask_due = 0, inf
    return copy
