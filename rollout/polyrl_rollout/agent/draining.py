"""What to do with running sequences when the end is near: finish those that can, hand the others back at once.

A sequence's remaining budget is an upper bound of its remaining tokens, so whoever is kept does finish; one that is
handed back early costs another engine a prefill, one that is kept in vain costs the time until the deadline.

Refuses to hold: clocks, engines. Read next: `app`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

RESERVE_SECONDS: Final = 2.0
"""Time before the deadline in which nothing generates: last tokens, returns and goodbye travel."""
RESERVE_SHARE: Final = 0.25
"""The reserve of a short notice, as a share of it."""


@dataclass(frozen=True)
class Work:
    """One running sequence."""

    assignment: int
    remaining: int
    """Tokens at most."""
    tokens_per_second: float
    """0: not known yet."""


@dataclass(frozen=True)
class DrainPlan:
    """Every assignment is in one of the two."""

    finish: tuple[int, ...]
    hand_back: tuple[int, ...]


def reserve_of(notice_s: float) -> float:
    """Seconds of a notice that are kept for saying goodbye."""
    return min(RESERVE_SECONDS, RESERVE_SHARE * max(0.0, notice_s))


def plan_drain(work: Iterable[Work], left_s: float) -> DrainPlan:
    """`left_s`: seconds that engines may still generate. A sequence of unknown speed is taken for an average one."""
    everything = tuple(work)
    known = [item.tokens_per_second for item in everything if item.tokens_per_second > 0]
    mean = sum(known) / len(known) if known else 0.0
    finish = tuple(w.assignment for w in everything if w.remaining <= left_s * (w.tokens_per_second or mean))
    kept = set(finish)
    return DrainPlan(finish, tuple(w.assignment for w in everything if w.assignment not in kept))
