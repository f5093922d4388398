"""How many tokens a turn will still have: a life table of the turns of this run, running ones included.

Lengths are cut into classes, three per doubling. Of each class the table knows how many turns reached it and how many
ended in it; a turn that still runs, or was taken away, counts half a time in the class that it is in (the actuarial
estimator, Cutler and Ederer 1958). So the short turns that end first do not make all others look short, and turns that
run long say so before they end.

    hazard(class)   = (ended + PRIOR_HAZARD) / (at risk + 1)
    remaining(turn) = mean residual life at its length, never more than its budget leaves

A class that nobody reached yet has PRIOR_HAZARD: a tail in which somewhat more than half of the turns end per doubling.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

CLASSES_PER_DOUBLING: Final = 3
FIRST_CLASS_TOKENS: Final = 8
"""End of the first class: differences below it change no decision."""
LONGEST_TURN_TOKENS: Final = 1 << 21
"""Above the longest context of any model."""
PRIOR_HAZARD: Final = 0.25
"""Share of the turns that end in a class of which nothing is known: 1 - 0.75 ** CLASSES_PER_DOUBLING per doubling. On
the long side: work that takes longer than was thought hurts a plan more than work that is done early."""
OUTLOOK_TURNS: Final = 16
"""Turns between two looks at the counts; before the first each turn may take its whole budget."""
MEMORY_TURNS: Final = 8192.0
"""Turns after which all counts are halved: a policy's answers change their length over some tens of steps."""


def _bounds() -> tuple[int, ...]:
    growth = 2.0 ** (1 / CLASSES_PER_DOUBLING)
    bounds, at = [0], float(FIRST_CLASS_TOKENS)
    while at < LONGEST_TURN_TOKENS:
        bounds.append(round(at))
        at *= growth
    return (*bounds, LONGEST_TURN_TOKENS)


BOUNDS: Final = _bounds()
"""First length of each class, and the end of the last."""

CLASSES: Final = len(BOUNDS) - 1


class Outlook(NamedTuple):
    """What a table says about turns that run."""

    hazards: tuple[float, ...]
    """Per class: the share that ends in it of those that reach it."""
    residual: tuple[float, ...]
    """Tokens still to come on the average, at the beginning of each class and at the end of the last."""

    def remaining(self, length: int, budget: int) -> int:
        """Tokens that a turn of `length` will still have on the average: 1 .. `budget`."""
        known = bisect_right(BOUNDS, length) - 1
        if known >= CLASSES:
            return max(1, budget)
        width = BOUNDS[known + 1] - BOUNDS[known]
        share = (BOUNDS[known + 1] - length) / width
        hazard = self.hazards[known] * share
        tokens = width * share * (1 - hazard / 2) + (1 - hazard) * self.residual[known + 1]
        return max(1, min(budget, int(tokens)))

    def longest(self, turns: Iterable[tuple[int, int]]) -> int:
        """Tokens until the last of these `turns` (length, budget) ends, as far as half of all such sets go."""
        classes = Counter[int]()
        budgets = dict[int, int]()
        for length, budget in turns:
            known = bisect_right(BOUNDS, length) - 1
            classes[known] += 1
            budgets[known] = max(budgets.get(known, 0), budget)
        low, high = 0, max(budgets.values(), default=0)
        while low < high:  # the number that is left falls with the tokens: the first below half a turn is searched
            middle = (low + high) // 2
            left = (n * self._survives(BOUNDS[k], middle) for k, n in classes.items() if budgets[k] > middle)
            low, high = (low, middle) if sum(left) < 0.5 else (middle + 1, high)
        return low

    def _survives(self, length: int, tokens: int) -> float:
        """Chance that a turn of `length` has more than `tokens` to come."""
        return _reach(self.hazards, length + tokens) / max(_reach(self.hazards, length), 1e-12)


class LengthTable(msgspec.Struct):
    """Counts per class; halved now and then, so not whole numbers."""

    reached: list[float] = msgspec.field(default_factory=lambda: [0.0] * CLASSES)
    ended: list[float] = msgspec.field(default_factory=lambda: [0.0] * CLASSES)
    turns: int = 0
    """Turns that have ended."""
    outlook: Outlook = msgspec.field(default_factory=lambda: _outlook([0.0] * CLASSES, [0.0] * CLASSES))
    """What the counts said at the last multiple of OUTLOOK_TURNS."""

    def grow(self, known: int, length: int) -> int:
        """A turn of class `known` (-1: it has not begun) now has `length` tokens; returns its class."""
        while known + 1 < CLASSES and length >= BOUNDS[known + 1]:
            known += 1
            self.reached[known] += 1.0
        return known

    def end(self, known: int) -> None:
        """A turn of that class has ended; -1: without a token."""
        self.turns += 1
        if known >= 0:
            self.ended[known] += 1.0
        if self.reached[0] > MEMORY_TURNS:
            self.reached = [count / 2 for count in self.reached]
            self.ended = [count / 2 for count in self.ended]
        if self.turns % OUTLOOK_TURNS == 0:
            self.outlook = _outlook(self.reached, self.ended)

    @property
    def is_known(self) -> bool:
        """Whether enough turns have ended to be believed."""
        return self.turns >= OUTLOOK_TURNS


def _reach(hazards: Sequence[float], length: int) -> float:
    """Chance that a turn reaches `length`."""
    survivors = _survivors(tuple(hazards))
    known = min(bisect_right(BOUNDS, length) - 1, CLASSES - 1)
    share = min(1.0, (length - BOUNDS[known]) / (BOUNDS[known + 1] - BOUNDS[known]))
    return survivors[known] * (1 - hazards[known] * share)


@lru_cache(maxsize=8)
def _survivors(hazards: tuple[float, ...]) -> tuple[float, ...]:
    chances, chance = [], 1.0
    for hazard in hazards:
        chances.append(chance)
        chance *= 1 - hazard
    return tuple(chances)


def _outlook(reached: Sequence[float], ended: Sequence[float]) -> Outlook:
    hazards, beyond = [], (*reached[1:], 0.0)
    for count, ends, further in zip(reached, ended, beyond, strict=True):
        running = max(0.0, count - ends - further)
        at_risk = max(ends, count - running / 2)
        hazards.append(min(1.0, (ends + PRIOR_HAZARD) / (at_risk + 1)))
    residual = [0.0]
    for known in range(CLASSES - 1, -1, -1):
        width, hazard = BOUNDS[known + 1] - BOUNDS[known], hazards[known]
        residual.append(width * (1 - hazard / 2) + (1 - hazard) * residual[-1])
    return Outlook(tuple(hazards), tuple(reversed(residual)))
