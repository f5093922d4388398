"""What all mutants have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from polyrl.ledger import apply, events as f

Patch = pytest.MonkeyPatch


class Mutant(NamedTuple):
    """One fault, and who must notice it."""

    breaks: Callable[[Patch], None]
    invariant: str
    seed: int
    """Of a schedule that shows it: the first one tried. Where schedules have changed, others are tried as well."""


def after(patch: Patch, event: type, change: Callable[[Any, Any], None]) -> None:
    """Whenever such an event was applied, `change(state, event)` follows."""
    honest = apply._APPLY[event]

    def applied(state: Any, event: Any) -> None:
        honest(state, event)
        change(state, event)

    patch.setitem(apply._APPLY, event, applied)


def after_move(patch: Patch, change: Callable[[Any, Any], None]) -> None:
    """Whenever a sample has left its engine, `change(state, sample)` follows."""
    honest = apply._APPLY[f.Moved]

    def moved(state: Any, event: f.Moved) -> None:
        sample = state.samples[state.assignments[event.assignment].sample]
        honest(state, event)
        change(state, sample)

    patch.setitem(apply._APPLY, f.Moved, moved)
