"""What length costs, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from polyrl.manifest.recipe import RecipeSpec
from polyrl_trainer.losses.advantages import whitened
from polyrl_trainer.losses.overlong import of_whole_step, overlong_penalty, shaped_advantages
from polyrl_trainer.sample import Sample


@pytest.mark.parametrize(("length", "penalty"), [(0, 0), (80, 0), (90, -0.5), (100, -1), (110, -1)])
def test_the_soft_penalty_by_hand(length: int, penalty: float) -> None:
    assert overlong_penalty(length, limit=100, buffer=20) == penalty
    assert overlong_penalty(length, limit=100, buffer=0) == 0


def sample(length: int, reward: float, finish: str = "stop") -> Sample:
    """A prompt of two tokens, of which nothing counts."""
    mask = np.array([0.0] * 2 + [1.0] * length, dtype=np.float32)
    tokens = np.zeros(2 + length, dtype=np.int64)
    return Sample(tokens, mask, prompt_length=2, group=1, reward=reward, finish_reason=finish)


def recipe(**algorithm: object) -> RecipeSpec:
    spec = {"advantage": "groupMean", **algorithm}
    return RecipeSpec.model_validate(
        {"model": {"config": {"model_type": "qwen2"}}, "algorithm": spec, "sampling": {"max_new_tokens": 10}}
    )


def advantages(samples: list[Sample]) -> list[float]:
    return [float(one.advantages[-1]) for one in samples if one.advantages is not None]


def test_the_penalty_moves_advantages_and_not_rewards() -> None:
    # Of 10 tokens with a buffer of 4: 8 long costs 0.5, 10 long 1; so 1, 0.5 and 0 with the mean 0.5.
    samples = shaped_advantages([sample(6, 1.0), sample(8, 1.0), sample(10, 1.0)], recipe(overlong_buffer=4))
    assert [one.penalty for one in samples] == [0, -0.5, -1]
    assert [one.reward for one in samples] == [1, 1, 1]
    assert advantages(samples) == [0.5, 0, -0.5]


def test_a_cut_sample_stays_in_the_mean_and_teaches_nothing() -> None:
    samples = [sample(3, 1.0), sample(10, 0.0, "length")]
    assert advantages(shaped_advantages(samples, recipe())) == [0.5, -0.5]
    shaped = shaped_advantages(samples, recipe(overlong_filter=True))
    assert advantages(shaped) == [0.5, 0]
    assert [one.left_out for one in shaped] == [False, True]


def test_a_cut_sample_is_in_the_steps_spread_too_and_teaches_nothing() -> None:
    spec = recipe(name="reinforce++", advantage=None, old_log_probs="recompute", overlong_filter=True)
    samples = shaped_advantages([sample(3, 1.0), sample(10, 0.0, "length")], spec)
    assert advantages(samples) == [1, 0]
    scaled = whitened(samples, spec.algorithm)
    assert advantages(scaled)[1] < 0, "it is below the step's mean"
    whole = of_whole_step(samples, spec.algorithm)
    assert advantages(whole) == [advantages(scaled)[0], 0]
    assert [one.left_out for one in whole] == [False, True]
