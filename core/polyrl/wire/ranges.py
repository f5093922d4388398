"""Sets of numbers that are mostly consecutive, as sorted half-open ranges: they stay small while the numbers grow."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from math import inf

Ranges = list[tuple[int, int]]
"""Half-open, sorted, with a gap between any two."""


def add_number(ranges: Ranges, number: int) -> None:
    """Adds, in place, a number that is not among them."""
    place = bisect_left(ranges, (number, number))
    start, end = number, number + 1
    if place and ranges[place - 1][1] == number:
        place -= 1
        start = ranges.pop(place)[0]
    if place < len(ranges) and ranges[place][0] == end:
        end = ranges.pop(place)[1]
    ranges.insert(place, (start, end))


def has_number(ranges: Iterable[tuple[int, int]], number: int) -> bool:
    """Whether one of sorted `ranges` holds it."""
    known = list(ranges)
    place = bisect_right(known, (number, inf))
    return place > 0 and number < known[place - 1][1]
