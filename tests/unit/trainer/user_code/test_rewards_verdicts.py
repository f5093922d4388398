"""What a reward function returns becomes a number or a typed reason, and never a silent 0."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from polyrl.sample import DiscardReason
from polyrl_trainer.generation.from_wire import TRUNCATED, turn_reward_metrics
from polyrl_trainer.loops.pass_rates import majority_rates, pass_rates
from polyrl_trainer.loops.step_metrics import learning_metrics
from polyrl_trainer.sample import ANSWER_HASH, Sample, shown_metrics
from polyrl_trainer.testing.inline_calls import InlineCalls
from polyrl_trainer.user_code.rewards import RewardFunction
from polyrl_trainer.user_code.verdicts import Reward, Unscored, read_admission, read_reward

SAMPLE = Sample(
    np.array([1, 2, 3]), np.array([0, 1, 1], np.float32), prompt_length=1, id="4.0", prompt="a", response="bc"
)


async def score(function):
    reward = RewardFunction(InlineCalls(function), timeout_s=60)
    return await reward.score(SAMPLE), reward.failures


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (1, Reward(1.0)),
        (0.0, Reward(0.0)),
        (True, Reward(1.0)),
        (np.float32(0.5), Reward(0.5)),
        (np.int64(3), Reward(3.0)),
        (np.array(2.0), Reward(2.0)),
        (torch.tensor(0.25), Reward(0.25)),
        ({"reward": 1, "exact_match": True}, Reward(1.0, {"exact_match": 1.0})),
    ],
    ids=["int", "float", "bool", "numpy float", "numpy int", "numpy scalar array", "torch scalar", "dict"],
)
def test_numbers_of_every_kind_are_rewards(returned, reward):
    assert read_reward(returned) == reward


@pytest.mark.parametrize("kind", [bool, np.bool_, np.array, torch.tensor])
def test_a_filter_answers_with_a_truth_value_of_any_kind(kind):
    """`np.std(rewards) > 0` is numpy's own."""
    assert read_admission(kind(True)) is None
    assert read_admission(kind(False)) == Unscored(DiscardReason.FILTERED, "filterFunction returned False")
    assert read_admission(1).reason is DiscardReason.REWARD_INVALID


def test_more_named_numbers_than_are_carried_are_no_reward():
    verdict = read_reward({"reward": 1.0} | {f"m{number:07}": 1.0 for number in range(400)}, "score")
    assert verdict.reason is DiscardReason.REWARD_INVALID
    assert verdict.detail.startswith("the numbers that score names beside `reward` take 9600 bytes")
    assert isinstance(read_reward({"reward": 1.0} | {f"m{number:07}": 1.0 for number in range(300)}), Reward)


@pytest.mark.parametrize(
    "returned",
    [
        None, "1.0", float("nan"), float("inf"), 10**400, 1j, [1.0], (1.0,), np.array([1.0, 2.0]),
        torch.tensor([1.0, 2.0]), np.complex64(1), {}, {"score": 1.0}, {"reward": None},
        {"reward": 1.0, "why": "text"}, object(), 1e13, -2e12, np.float64(1e300), {"reward": 1e308, "exact_match": 1},
    ],
    ids=lambda returned: "object()" if type(returned) is object else repr(returned),
)  # fmt: skip
def test_anything_else_is_invalid(returned):
    verdict = read_reward(returned)
    assert isinstance(verdict, Unscored)
    assert verdict.reason is DiscardReason.REWARD_INVALID


@pytest.mark.parametrize("name", ["", "  ", 3, None, ("a", 1), b"length"])
async def test_a_metric_needs_a_name_that_is_text(name: object) -> None:
    def score_length(sample):
        return {"reward": 1.0, name: 2.0}

    verdict, _ = await score(score_length)
    assert isinstance(verdict, Unscored)
    assert verdict.reason is DiscardReason.REWARD_INVALID
    assert f"score_length names a number {name!r}; a name is text that is not empty" in verdict.detail
    assert "\n" not in verdict.detail


def names_of_the_runs_own() -> set[str]:
    """What stands beside the means of a reward's numbers in a step's metrics, in an evaluation's, and on a sample."""
    scored = replace(SAMPLE, penalty=-0.5, advantages=np.zeros(3))
    step = learning_metrics([scored], {"padding_fraction": 0.0}, [])
    votes = [(True, 1.0), (False, 2.0)]
    return {
        *(name.removeprefix("reward/") for name in step if name.startswith("reward/")),
        *pass_rates([[passed for passed, _ in votes]]),
        *majority_rates([votes]),
        *("clip_ratio", "scored", "unscored"),
        *turn_reward_metrics([0.5, 0.5]),
        *(TRUNCATED, ANSWER_HASH),
    }


@pytest.mark.parametrize("name", sorted(names_of_the_runs_own()))
async def test_a_number_that_would_be_taken_for_one_of_the_runs_own_is_refused(name: str) -> None:
    def score_length(sample):
        return {"reward": 1.0, name: 2.0, "answer": "42"}

    verdict, _ = await score(score_length)
    assert isinstance(verdict, Unscored)
    assert verdict.reason is DiscardReason.REWARD_INVALID
    assert verdict.detail == f"score_length names a number {name!r}, as the run names one of its own; name it otherwise"


@pytest.mark.parametrize("name", ["mean_length", "scored_by_judge", "pass@best", "turn_rewards", "Mean"])
def test_a_number_whose_name_is_only_like_one_of_the_runs_own_is_taken(name: str) -> None:
    assert read_reward({"reward": 1.0, name: 2.0}) == Reward(1.0, {name: 2.0})


async def test_what_user_code_names_is_cut_in_a_refusal() -> None:
    verdict, _ = await score(lambda sample: {"x" * 1_000_000: 1.0})
    assert isinstance(verdict, Unscored)
    assert len(verdict.detail) < 1000


def test_equal_answers_are_equal_numbers_and_others_are_not() -> None:
    def number(answer: object) -> float | None:
        read = read_reward({"reward": 1, "answer": answer})
        assert isinstance(read, Reward)
        assert "answer" not in read.metrics
        return read.metrics.get(ANSWER_HASH)

    assert number("42") == number(" 42\n") != number("43")
    assert number("\ud800") is not None
    assert number(None) is None
    assert number(42) == number(42.0) == number(np.int64(42)) == number("42") != number(42.5)
    assert number(-0.0) == number(0), "a rounded -0.2 votes with the others"
    assert number(10**20) != number(10**20 + 1)
    assert isinstance(read_reward({"reward": 1, "answer": math.nan}), Unscored)
    assert isinstance(read_reward({"reward": 1, "answer": ["42"]}), Unscored)
    read = read_reward({"reward": 1, "answer": "42", "length": 3})
    assert isinstance(read, Reward)
    assert shown_metrics(read.metrics) == {"length": 3.0}
