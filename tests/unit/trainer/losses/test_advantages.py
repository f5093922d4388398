"""Group-relative advantages against numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from polyrl.errors import InvalidData
from polyrl.manifest.parts.algorithm import AdvantageEstimator, AlgorithmSpec
from polyrl_trainer.loops.step_metrics import learning_metrics
from polyrl_trainer.losses.advantages import WITHIN_GROUP, group_advantages, whitened, with_advantages
from polyrl_trainer.sample import Sample


def test_by_hand_with_interleaved_groups() -> None:
    # Group 7: 1, 0, 0, 1, mean 1/2, unbiased std sqrt(1/3). Group 9: 2, 5, mean 3.5, std 3 / sqrt(2).
    advantages = group_advantages([1, 2, 0, 0, 5, 1], [7, 9, 7, 7, 9, 7])
    high = math.sqrt(3) / 2
    assert advantages.tolist() == pytest.approx([high, -math.sqrt(0.5), -high, -high, math.sqrt(0.5), high], abs=1e-5)
    assert advantages.dtype == np.float32


@pytest.mark.parametrize(
    ("estimator", "rewards", "expected"),
    [
        pytest.param("groupNorm", [1, 0, 0, 1], [0.866024, -0.866024, -0.866024, 0.866024], id="std"),
        pytest.param("groupMean", [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5], id="no-std"),
        pytest.param("rloo", [1, 0, 0, 1], [2 / 3, -2 / 3, -2 / 3, 2 / 3], id="others"),
        pytest.param("groupNorm", [1, 0, 0, 0], [1.499997, -0.499999, -0.499999, -0.499999], id="one-success-std"),
        pytest.param("rloo", [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3], id="one-success-others"),
        pytest.param("rloo", [7], [0], id="alone"),
    ],
)
def test_each_estimator_by_hand(estimator: str, rewards: list[float], expected: list[float]) -> None:
    found = group_advantages(rewards, [4] * len(rewards), AdvantageEstimator(estimator))
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


@given(st.floats(-1e6, 1e6), st.integers(1, 12), st.sampled_from(list(WITHIN_GROUP)))
def test_equal_rewards_give_exactly_zero(reward: float, size: int, estimator: AdvantageEstimator) -> None:
    assert not group_advantages([reward] * size, [3] * size, estimator).any()


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
    first, second = with_advantages(samples, AlgorithmSpec(advantage="groupMean"))
    assert first.advantages is not None
    assert second.advantages is not None
    assert first.advantages.tolist() == [0, 0, -1, -1]
    assert second.advantages.tolist() == [0, 0, 1, 1]


def pair(*, logprobs: bool = True) -> list[Sample]:
    """A of two tokens, rewarded 1, and B of three, rewarded 0; each after a prompt of one token."""
    rows = [(1.0, [-1.2, -1.0], [-1.1, -1.5]), (0.0, [-1.2, -1.0, -2.2], [-1.0, -1.5, -0.6])]
    return [
        Sample(
            np.arange(1 + len(drawn)), np.array([0] + [1] * len(drawn), np.float32), prompt_length=1, group=1,
            reward=reward, rollout_log_probs=np.array([0, *drawn], np.float32) if logprobs else None,
            reference_log_probs=np.array([0, *reference], np.float32),
        )
        for reward, drawn, reference in rows
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kl", "first", "second"),
    [
        pytest.param(0.0, [1.095445] * 2, [-0.730297] * 3, id="no-penalty"),
        # k1 of A: -.1, .5; of B: -.2, .5, -1.6. Returns .96, .95 and .13, .11, .16.
        pytest.param(0.1, [1.105657, 1.083455], [-0.737105, -0.781509, -0.670499], id="penalty-in-the-reward"),
    ],
)
def test_reinforce_plus_plus_by_hand(kl: float, first: list[float], second: list[float]) -> None:
    spec = AlgorithmSpec(name="reinforce++", kl_coefficient=kl, kl_place="reward")
    found = [one.advantages for one in whitened(with_advantages(pair(), spec), spec)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].tolist() == pytest.approx([0, *first], abs=2e-6)
    assert found[1].tolist() == pytest.approx([0, *second], abs=2e-6)


def test_a_penalty_in_the_reward_is_taken_before_groups_are_compared() -> None:
    spec = AlgorithmSpec(advantage="groupMean", kl_coefficient=0.1, kl_place="reward")
    first, second = with_advantages(pair(), spec)
    # Rewards 1 - .1 * .4 = .96 and 0 + .1 * 1.3 = .13.
    assert first.advantages is not None
    assert second.advantages is not None
    assert first.advantages.tolist() == pytest.approx([0, 0.415, 0.415], abs=1e-6)
    assert second.advantages.tolist() == pytest.approx([0, -0.415, -0.415, -0.415], abs=1e-6)
    assert [first.reward, second.reward] == [1.0, 0.0], "what is reported is the task's"
    with pytest.raises(InvalidData, match="rollout_log_probs"):
        with_advantages(pair(logprobs=False), spec)


def test_what_a_penalty_in_the_reward_is_made_of_is_a_metric() -> None:
    # Mean k1 of A .4 / 2, of B -1.3 / 3: as verl's, a mean of means, and without the coefficient.
    learned = {"padding_fraction": 0.0}
    samples = with_advantages(pair(), AlgorithmSpec(kl_coefficient=0.1, kl_place="reward"))
    found = learning_metrics(samples, learned, [])["actor/reward_kl_penalty"]
    assert found == pytest.approx((0.2 - 1.3 / 3) / 2, abs=1e-6)
    in_loss = with_advantages(pair(), AlgorithmSpec(kl_coefficient=0.1, kl_place="loss"))
    assert "actor/reward_kl_penalty" not in learning_metrics(in_loss, learned, [])


def test_what_compares_within_groups_is_left_as_it_is_by_the_step() -> None:
    spec = AlgorithmSpec()
    samples = with_advantages(pair(), spec)
    assert whitened(samples, spec) == samples
