"""Group-relative advantages against numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from polyrl_trainer.losses.grpo import group_advantages, with_group_advantages
from polyrl_trainer.sample import Sample


def test_by_hand_with_interleaved_groups() -> None:
    # Group 7: 1, 0, 0, 1, mean 1/2, unbiased std sqrt(1/3). Group 9: 2, 5, mean 3.5, std 3 / sqrt(2).
    advantages = group_advantages([1, 2, 0, 0, 5, 1], [7, 9, 7, 7, 9, 7])
    high = math.sqrt(3) / 2
    assert advantages.tolist() == pytest.approx([high, -math.sqrt(0.5), -high, -high, math.sqrt(0.5), high], abs=1e-5)
    assert advantages.dtype == np.float32


def test_without_division_by_std() -> None:
    assert group_advantages([1, 0, 0, 1, 2, 5], [0, 0, 0, 0, 1, 1], normalize=False).tolist() == [
        0.5,
        -0.5,
        -0.5,
        0.5,
        -1.5,
        1.5,
    ]


@given(st.floats(-1e6, 1e6), st.integers(1, 12), st.booleans())
def test_equal_rewards_give_exactly_zero(reward: float, size: int, normalize: bool) -> None:
    assert not group_advantages([reward] * size, [3] * size, normalize=normalize).any()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-50, 50)), min_size=1, max_size=40), st.integers(-9, 9))
def test_a_group_sums_to_zero_and_a_constant_reward_changes_nothing(rows: list[tuple[int, int]], shift: int) -> None:
    groups = [group for group, _ in rows]
    rewards = np.array([reward for _, reward in rows])
    advantages = group_advantages(rewards, groups)
    for group in set(groups):
        assert advantages[np.array(groups) == group].sum() == pytest.approx(0.0, abs=1e-4)
    assert group_advantages(rewards + shift, groups) == pytest.approx(advantages, abs=1e-4)


def test_no_samples_no_advantages() -> None:
    assert group_advantages([], []).shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=repr)
def test_a_reward_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, bad], [0, 0])


def test_samples_carry_their_advantage_on_learned_positions_only() -> None:
    mask = np.array([0, 0, 1, 1], dtype=np.float32)
    samples = [Sample(np.arange(4), mask, prompt_length=2, group=5, reward=reward) for reward in (1.0, 3.0)]
    first, second = with_group_advantages(samples, normalize=False)
    assert first.advantages is not None
    assert second.advantages is not None
    assert first.advantages.tolist() == [0, 0, -1, -1]
    assert second.advantages.tolist() == [0, 0, 1, 1]
