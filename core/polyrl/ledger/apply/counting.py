"""Two changes of state that all folds share. Part of `fold`."""

from __future__ import annotations

from polyrl.ledger.state import LedgerState


def wake(state: LedgerState, at: float) -> None:
    """There is something to do at `at`."""
    state.due = min(state.due, at)


def count(counts: dict[str, int], key: str, amount: int = 1) -> None:
    """Adds to a named count."""
    counts[key] = counts.get(key, 0) + amount
