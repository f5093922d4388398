"""Mini-batches that a seed draws."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polyrl.manifest.parts.algorithm import AlgorithmSpec
from polyrl.manifest.recipe import RecipeSpec
from polyrl.sample import sample_id
from polyrl_trainer.loops import offline_loop
from polyrl_trainer.loops.mini_batches import draw_mini_batches, updates_per_step, updates_until
from polyrl_trainer.loops.offline_loop import mini_batches_by_epoch
from polyrl_trainer.sample import Sample

SAMPLES = [
    Sample(np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.float32), 0, id=sample_id(group, index), group=group)
    for group in range(6, 18)
    for index in range(12)
]


def ids(mini_batches: list[list[Sample]]) -> list[list[str]]:
    return [[sample.id for sample in one] for one in mini_batches]


def test_they_mix_all_groups_and_do_not_depend_on_the_order_of_completion() -> None:
    drawn = draw_mini_batches(SAMPLES, 4, (0, 3))
    assert [len(one) for one in drawn] == [48, 48, 48]
    assert all(len({sample.group for sample in one}) == 12 for one in drawn)
    assert sorted(one for mini_batch in ids(drawn) for one in mini_batch) == sorted(sample.id for sample in SAMPLES)
    shuffled = random.Random(1).sample(SAMPLES, len(SAMPLES))
    assert ids(draw_mini_batches(shuffled, 4, (0, 3))) == ids(drawn)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({}, 1),
        ({"mini_batch_prompts": 8}, 4),
        ({"update_epochs": 3}, 3),
        ({"mini_batch_prompts": 8, "update_epochs": 3}, 12),
    ],
)
def test_optimizer_steps_of_one_rl_step(algorithm: dict[str, int], expected: int) -> None:
    assert updates_per_step(AlgorithmSpec(prompts_per_step=32, **algorithm)) == expected


def test_steps_and_seeds_draw_others() -> None:
    first = ids(draw_mini_batches(SAMPLES, 4, (0, 3)))
    assert first != ids(draw_mini_batches(SAMPLES, 4, (0, 4))) != ids(draw_mini_batches(SAMPLES, 4, (1, 4)))


def test_groups_of_a_file_may_be_of_any_size() -> None:
    sizes = {6: 3, 7: 1, 8: 12, 9: 5}
    samples = [one for one in SAMPLES if one.group in sizes and int(one.id.split(".")[1]) < sizes[one.group]]
    drawn = draw_mini_batches([replace(one, id="") for one in samples], 2, (0, 3))
    assert [len(one) for one in drawn] == [11, 10]
    assert sorted(one.group for mini_batch in drawn for one in mini_batch) == sorted(one.group for one in samples)


def test_further_epochs_over_a_file_are_other_mini_batches_of_the_same_samples() -> None:
    nameless = [replace(one, id="") for one in SAMPLES]
    algorithm = {"promptsPerStep": 12, "miniBatchPrompts": 3, "updateEpochs": 3}
    recipe = RecipeSpec.model_validate(
        {"mode": "offline-rl", "seed": 4, "model": {"config": {"model_type": "qwen2"}}, "algorithm": algorithm}
    )
    first = [nameless[start : start + 36] for start in range(0, 144, 36)]
    epochs = mini_batches_by_epoch(first, recipe, step=2)
    groups = [[sample.group for sample in one] for one in epochs]
    assert epochs[:4] == first
    passes = [groups[start : start + 4] for start in (0, 4, 8)]
    whole = sorted(sample.group for sample in SAMPLES)
    assert all(sorted(group for mini_batch in one for group in mini_batch) == whole for one in passes)
    assert len({str(one) for one in passes}) == 3
    assert groups == [[s.group for s in one] for one in mini_batches_by_epoch(first, recipe, step=2)]
    assert groups != [[s.group for s in one] for one in mini_batches_by_epoch(first, recipe, step=3)]


async def test_a_step_over_a_file_is_scaled_as_a_whole_however_it_is_divided() -> None:
    """By itself each of its mini-batches would have no spread, and teach nothing."""
    tokens, learned = np.zeros(2, dtype=np.int64), np.array([0, 1], dtype=np.float32)
    drawn = [
        tuple(
            Sample(tokens, learned, 1, reward=reward, rollout_log_probs=-learned, old_log_probs=-learned) for _ in "ab"
        )
        for reward in (1.0, 0.0)
    ]
    algorithm = {"name": "reinforce++", "promptsPerStep": 2, "miniBatchPrompts": 1}
    recipe = RecipeSpec.model_validate({"model": {"path": "m"}, "algorithm": algorithm})
    nobody: Any = None
    mini_batches = await offline_loop._prepare(nobody, drawn, recipe, None, None)
    found = [[float(one.advantages[1]) for one in each if one.advantages is not None] for each in mini_batches]
    # Unbiased variance of 1, 1, 0, 0: 1/3, so .5 * sqrt(3).
    assert found == [pytest.approx([0.866025] * 2), pytest.approx([-0.866025] * 2)]


@pytest.mark.parametrize(
    ("name", "step", "groups", "updates"),
    [
        ("grpo", 0, 0, 0),
        ("grpo", 3, 0, 12),
        ("grpo", 3, 4, 13),
        ("ppo", 1, 4, 0),
        ("ppo", 2, 0, 0),
        ("ppo", 2, 4, 1),
        ("ppo", 5, 0, 12),
    ],
)
def test_the_policy_takes_none_while_a_critic_warms_up(name: str, step: int, groups: int, updates: int) -> None:
    given = {"name": name, "promptsPerStep": 8, "miniBatchPrompts": 4, "updateEpochs": 2}
    critic = {"critic": {"warmupSteps": 2}} if name == "ppo" else {}
    assert updates_until(AlgorithmSpec.model_validate(given | critic), step, groups) == updates
