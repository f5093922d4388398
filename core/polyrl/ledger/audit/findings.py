"""What an audit has looked at and what it found broken, by invariant."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

TITLES: Final = {
    "I1": "every sample ends once: acknowledged, or discarded for a reason",
    "I2": "no step is silently short: whole groups, packed once, as many as were asked for",
    "I3": "a batch is trained once, and holds no more than was asked for",
    "I4": "no token after the end of a turn, none doubled, none missing, none over the budget",
    "I5": "no request waits beyond its deadline",
    "I6": "every token is of a version that its engine had verified and its sample may use",
    "I7": "an engine works, serves and leaves only under its lease",
    "I8": "a silent engine gets nothing new after a lease, and leaves in time",
    "I9": "the reserved window is bounded by the work left",
    "I10": "replayed events give what the history shows",
    "I11": "bytes are linear in tokens",
}
"""Titles of the invariants that a journal can show."""


class Verdict(NamedTuple):
    """One line of an audit."""

    invariant: str
    title: str
    examined: dict[str, int]
    """What was looked at, and how much of it; empty when the journal does not show this invariant."""
    broken: int
    first: str
    """The first broken event; or, when nothing was looked at, why not."""


class Findings:
    """What was looked at and found, while an audit goes on."""

    def __init__(self) -> None:
        self._examined: dict[str, Counter[str]] = {invariant: Counter() for invariant in TITLES}
        self._broken: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def saw(self, invariant: str, what: str, count: int = 1) -> None:
        """`count` more of `what` were looked at."""
        self._examined[invariant][what] += count

    def broke(self, invariant: str, at: float, text: str) -> None:
        """A event that cannot be; the first one is kept."""
        self._broken[invariant] += 1
        self._first.setdefault(invariant, f"at {at:.3f} s: {text}")

    def first_broken(self) -> tuple[str, str] | None:
        """The invariant that broke first, and how."""
        return next(iter(self._first.items()), None)

    def verdicts(self) -> list[Verdict]:
        """One per invariant, in order."""
        return [self._verdict(invariant) for invariant in TITLES]

    def _verdict(self, invariant: str) -> Verdict:
        examined = dict(self._examined[invariant])
        first = self._first.get(invariant, "" if examined else "nothing of it happened")
        return Verdict(invariant, TITLES[invariant], examined=examined, broken=self._broken[invariant], first=first)
