"""Advantages per turn, against numbers worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from polyrl.manifest.parts.algorithm import AlgorithmSpec
from polyrl_trainer.losses import with_advantages
from polyrl_trainer.losses.turns import turn_returns
from polyrl_trainer.sample import Sample


def sample(turns: list[int], paid: list[float], reward: float, group: int = 3) -> Sample:
    """A prompt of one token, turns of so many tokens, and one token of the environment after each but the last."""
    mask, starts = [0], list[int]()
    for length in turns:
        starts.append(len(mask))
        mask += [1] * length + [0]
    del mask[-1]
    return Sample(
        np.zeros(len(mask), dtype=np.int64),
        np.array(mask, dtype=np.float32),
        1,
        group=group,
        reward=reward,
        turn_rewards=tuple(paid),
        turn_starts=tuple(starts),
    )


def advantages(samples: list[Sample], **changes: object) -> list[list[float]]:
    algorithm = AlgorithmSpec.model_validate({"advantage": "turnNorm", **changes})
    found = with_advantages(samples, algorithm)
    return [[round(float(value), 4) for value in one.advantages] for one in found if one.advantages is not None]


def test_returns_to_go_by_hand() -> None:
    assert turn_returns([1.0, 0.0, 2.0], 0.5) == [1.5, 1.0, 2.0]
    assert turn_returns([], 1.0) == []


def test_each_turn_is_compared_with_the_same_turn_of_its_group() -> None:
    # Returns by turn: A 1 + 0 + 1 = 2, 1. B 0 + 1 = 1, 1. C 0 alone. Turn 0: 2, 1, 0, mean 1, std 1. Turn 1: equal.
    rows = [sample([2, 1], [1.0], 1.0), sample([1, 2], [0.0], 1.0), sample([1], [], 0.0)]
    assert advantages(rows) == [[0, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, -1]]


def test_the_discount_counts_turns_and_the_environments_tokens_carry_nothing() -> None:
    # Gamma 1/2. A: turn 1 gives 0 + 4 = 4, turn 0 gives 1 + 2 = 3. B: 2, 0 + 1 = 1. Two values: +-1/sqrt 2.
    half = round(math.sqrt(0.5), 4)
    rows = [sample([1, 1], [1.0, 0.0], 4.0), sample([1, 1], [0.0], 2.0)]
    assert advantages(rows, turnDiscount=0.5) == [[0, half, 0, half], [0, -half, 0, -half]]


def test_without_turns_it_is_grpo() -> None:
    rows = [Sample(np.zeros(3, dtype=np.int64), np.array([0, 1, 1], dtype=np.float32), 1, group=g, reward=r)
            for g, r in ((1, 1.0), (1, 0.0), (2, 5.0), (2, 1.0))]  # fmt: skip
    plain = with_advantages(rows, AlgorithmSpec())
    expected = [one.advantages for one in plain if one.advantages is not None]
    assert advantages(rows) == [[round(float(value), 4) for value in row] for row in expected]


def test_a_turn_without_a_token_passes_its_reward_on_to_the_turns_before_it() -> None:
    rows = [sample([1, 0], [0.0, 3.0], 0.0), sample([1, 1], [0.0], 0.0)]
    assert advantages(rows)[0] == [0, round(math.sqrt(0.5), 4), 0]


@pytest.mark.parametrize(("cost", "expected"), [(0.0, 0.0), (1.0, -round(math.sqrt(0.5), 4))])
def test_a_penalty_in_the_reward_counts_in_the_turn_that_it_is_of(cost: float, expected: float) -> None:
    rows = [sample([1, 1], [0.0], 1.0), sample([1, 1], [0.0], 1.0)]
    costly = np.array([0, 0, 0, cost], dtype=np.float32)
    zeros = np.zeros(4, dtype=np.float32)
    rows = [_with(rows[0], costly, zeros), _with(rows[1], zeros, zeros)]
    found = advantages(rows, klCoefficient=0.5, klPlace="reward")
    assert found[0] == [0, expected, 0, expected]


def _with(one: Sample, rollout: np.ndarray, reference: np.ndarray) -> Sample:
    return replace(one, rollout_log_probs=rollout, reference_log_probs=reference)
