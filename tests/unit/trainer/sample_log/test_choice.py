"""Which few samples of a step are kept."""

import random
from collections import Counter

import pytest

from polyrl.sample_record import Chosen
from polyrl_trainer.sample_log.choice import choose

B, W, R = Chosen.BEST, Chosen.WORST, Chosen.RANDOM
GROUPS = [0, 1, 0, 1, 2, 2]


@pytest.mark.parametrize(
    ("rewards", "limit", "kept", "reasons"),
    [
        pytest.param([0, 0, 0, 9, -1, 0], 0, 0, {}, id="none"),
        pytest.param([0, 0, 0, 9, -1, 0], 1, 1, {}, id="one is drawn"),
        pytest.param([0, 0, 0, 9, -1, 0], 2, 2, {3: B, 4: W}, id="two are the extremes"),
        pytest.param([0, 0, 0, 9, -1, 0], 8, 6, {3: B, 4: W}, id="more room than samples"),
        pytest.param([1, 1, 1, 1, 1, 1], 4, 4, {}, id="no extremes among equals"),
        pytest.param([5], 4, 1, {}, id="one sample"),
    ],
)
def test_what_is_kept(rewards: list[float], limit: int, kept: int, reasons: dict[int, Chosen]) -> None:
    chosen = choose(GROUPS[: len(rewards)], rewards, limit, random.Random(3))
    assert len(chosen) == kept
    assert {position: why[0] for position, why in chosen.items() if why[0] is not R} == reasons
    assert list(chosen) == sorted(chosen)


def test_a_drawn_group_is_whole_and_its_extremes_count_in_it() -> None:
    chosen = choose([0, 0, 0, 1, 1, 1], [0, 1, 2, 3, 4, 5], 5, random.Random(1))
    drawn = [position for position, why in chosen.items() if R in why]
    assert drawn in ([0, 1, 2], [3, 4, 5])


def test_every_sample_is_as_likely_to_be_drawn_and_ties_are_no_matter_of_arrival() -> None:
    drawn, best = Counter[int](), Counter[int]()
    for seed in range(3000):
        chosen = choose([0, 0, 1, 1], [1, 1, 1, 0], 3, random.Random(seed))
        drawn.update(position for position, why in chosen.items() if R in why)
        best.update(position for position, why in chosen.items() if B in why)
    assert all(0.22 < drawn[position] / 3000 < 0.28 for position in range(4))
    assert all(0.30 < best[position] / 3000 < 0.37 for position in range(3))


def test_a_step_that_is_trained_again_keeps_the_same() -> None:
    first, again = (choose(GROUPS, [1, 2, 3, 4, 5, 6], 4, random.Random("7 rl 3")) for _ in range(2))
    assert first == again
