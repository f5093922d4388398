"""How long the learner waits."""

from __future__ import annotations

import pytest

from polyrl.manifest.recipe import RecipeSpec
from polyrl_trainer.loops.deadline import longest_wait_s


@pytest.mark.parametrize(
    ("tokens", "speed", "more", "seconds"),
    [
        (32_000, 40.0, {}, 600 + 1600),
        (32_000, None, {}, 600 + 6400),
        (1_000, 0.01, {}, 600 + 2000),
        (1_000, 1000.0, {"reward": {"function": "r:score", "timeout_seconds": 30}}, 600 + 2 + 30),
        (1_000, 1000.0, {"environment": {"class_path": "e:E", "max_turns": 4, "timeout_seconds": 50}}, 600 + 2 + 200),
    ],
    ids=["32k tokens at 40 a second", "nothing measured", "short answers", "a reward", "an environment"],
)
def test_the_longest_answer_fits(tokens: int, speed: float | None, more: dict[str, object], seconds: float) -> None:
    recipe = RecipeSpec.model_validate(
        {"model": {"config": {"model_type": "qwen2"}}, "sampling": {"max_new_tokens": tokens}, **more}
    )
    assert longest_wait_s(recipe, speed) == seconds


def test_a_set_of_longer_answers_is_awaited_for_longer() -> None:
    recipe = RecipeSpec.model_validate({"model": {"path": "m"}, "sampling": {"max_new_tokens": 1_000}})
    assert longest_wait_s(recipe, 10.0, 32_000) == 600 + 6400
    assert longest_wait_s(recipe, 10.0, 10) == 600 + 200


def test_a_filter_of_the_users_may_take_as_long_as_the_reward_before_it() -> None:
    recipe = RecipeSpec.model_validate(
        {
            "model": {"path": "m"},
            "sampling": {"max_new_tokens": 10},
            "reward": {"function": "r:score", "timeout_seconds": 3600},
            "algorithm": {"group_filter": "custom", "filter_function": "r:keep"},
        }
    )
    assert longest_wait_s(recipe, 10.0) == 600 + 2 + 2 * 3600


def test_the_reward_of_an_evaluations_own_may_take_longer_than_the_recipes() -> None:
    reward = {"function": "r:score", "timeout_seconds": 30}
    recipe = RecipeSpec.model_validate({"model": {"path": "m"}, "sampling": {"max_new_tokens": 10}, "reward": reward})
    assert longest_wait_s(recipe, 10.0, judge_s=3600) == 600 + 2 + 3600
    assert longest_wait_s(recipe, 10.0, judge_s=1) == 600 + 2 + 30
