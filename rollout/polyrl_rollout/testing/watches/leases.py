"""Who was not heard for long has no lease, and runs nothing (I8)."""

from __future__ import annotations

from collections.abc import Mapping

from polyrl.ledger.causes import RestPhase
from polyrl.ledger.measures.rests import GIVE_UP_S
from polyrl.ledger.state import LedgerState


def overdue_lease(state: LedgerState, last_seen: Mapping[str, float], deaf_until: float, now: float) -> str:
    """What is wrong, in a sentence; empty if nothing is. `last_seen`: when each was heard last, by who sends for it;
    `deaf_until`: the manager itself heard nobody before."""
    gone_s = state.config.gone_s
    for name, engine in state.engines.items():
        silent_s = now - max(last_seen.get(name, now), deaf_until)
        if silent_s <= gone_s:
            continue
        # One that may hold the learner's devices is counted on for so long again after it is ordered to sleep.
        shares = engine.rest.able and engine.rest.phase is not RestPhase.ASLEEP
        if engine.running:
            return f"{name} was last heard {silent_s:.2f} s ago and runs samples"
        if silent_s > (2 * GIVE_UP_S if shares else gone_s):
            return f"{name} was last heard {silent_s:.2f} s ago and has a lease"
    return ""
