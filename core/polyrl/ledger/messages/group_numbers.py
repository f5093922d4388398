"""Which group numbers were ever submitted, in memory that does not grow with the run."""

from __future__ import annotations

from bisect import bisect_right
from math import inf

from polyrl.ledger.state import LedgerState


def next_number(state: LedgerState) -> int:
    """The first number above all that were submitted."""
    return state.seen[-1][1] if state.seen else 0


def was_seen(state: LedgerState, number: int) -> bool:
    """True for every number that a GroupSubmitted carried, live or ended."""
    place = bisect_right(state.seen, (number, inf))
    return place > 0 and number < state.seen[place - 1][1]
