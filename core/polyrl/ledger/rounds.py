"""Looks at many things, a few of them in each tick: none keeps others waiting for longer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from math import inf
from typing import Final, Generic, TypeVar

T = TypeVar("T")

AT_ONCE: Final = 2048
"""Things looked at in one tick: some 3 ms."""


class Round(Generic[T]):
    """One look at everything there is, and the next one once that is over."""

    def __init__(self) -> None:
        self._left: Iterator[T] = iter(())
        self._begun_at = self._least = inf
        self._ticks = 0

    def some(self, everything: Iterable[T], now: float) -> list[T]:
        """The next few, some of which may be gone; at the beginning of a look the first of `everything`."""
        if not self._ticks:
            self._left, self._begun_at, self._least = iter(tuple(everything)), now, inf
        self._ticks += 1
        return list(islice(self._left, AT_ONCE))

    def due_after(self, read: list[T], dues: Iterable[float], now: float, shortest_s: float) -> float:
        """When there is something to look at again, once `read` is: at once if that is not all, else at the least of
        the look's `dues`; what came meanwhile is due `shortest_s` after its beginning at the earliest."""
        self._least = min(self._least, min(dues, default=inf))
        if len(read) == AT_ONCE:
            return now
        came_meanwhile = self._begun_at + shortest_s if self._ticks > 1 else inf
        self._ticks = 0
        return min(self._least, came_meanwhile)
