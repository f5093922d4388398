"""What a life table says of turns that run."""

from __future__ import annotations

from random import Random

import pytest

from polyrl.ledger.measures.lengths import BOUNDS, CLASSES, MEMORY_TURNS, LengthTable, _outlook


def observed(lengths: list[int], now: int) -> LengthTable:
    """Turns that all began together, when the longest of them has `now` tokens."""
    table = LengthTable()
    for length in lengths:
        known = table.grow(-1, min(length, now))
        if length <= now:
            table.end(known)
    table.outlook = _outlook(table.reached, table.ended)
    return table


def drawn(seed: int, count: int = 400, median: float = 400.0) -> list[int]:
    draws = Random(seed)
    return [min(8000, int(median * draws.lognormvariate(0, 1))) + 1 for _ in range(count)]


def left_of(lengths: list[int], now: int) -> float:
    running = [length - now for length in lengths if length > now]
    return sum(running) / len(running)


@pytest.mark.parametrize("now", [0, 100, 400, 1600])
@pytest.mark.parametrize("seed", range(3))
def test_a_table_of_whole_turns_tells_what_is_left(seed: int, now: int) -> None:
    lengths = drawn(seed, 4000)
    left = observed(lengths, 10_000).outlook.remaining(now, 8000)
    assert left == pytest.approx(left_of(lengths, now), rel=0.2)


@pytest.mark.parametrize("seed", range(3))
def test_short_turns_that_end_first_do_not_make_all_look_short(seed: int) -> None:
    lengths, now = drawn(seed), 300
    left = observed(lengths, now).outlook.remaining(now, 8000)
    ended = [length for length in lengths if length <= now]
    assert left > 1.5 * sum(ended) / len(ended), "what the mean of those that ended would say"
    assert left > 0.4 * left_of(lengths, now)


def test_nothing_is_expected_beyond_the_budget_and_something_always() -> None:
    outlook = observed(drawn(1), 10_000).outlook
    assert outlook.remaining(0, 7) == 7
    assert outlook.remaining(7999, 1) == 1
    assert outlook.remaining(BOUNDS[-1] + 5, 3) == 3


def test_the_longest_of_many_lasts_longer_than_one() -> None:
    lengths = drawn(2, 4000)
    outlook = observed(lengths, 10_000).outlook
    one, many = outlook.longest([(0, 8000)]), outlook.longest([(0, 8000)] * 100)
    assert one == pytest.approx(sorted(lengths)[2000], rel=0.2), "half of all end before"
    assert many == pytest.approx(sorted(lengths)[-28], rel=0.25), "the median of the longest of a hundred"
    assert outlook.longest([]) == 0
    assert outlook.longest([(0, 50)] * 100) == 50


def test_old_turns_are_forgotten() -> None:
    table = observed([50] * int(3 * MEMORY_TURNS), 100)
    for _ in range(int(3 * MEMORY_TURNS)):
        table.end(table.grow(-1, 3000))
    assert table.outlook.remaining(0, 10_000) > 2000
    assert len(table.reached) == len(table.ended) == CLASSES
