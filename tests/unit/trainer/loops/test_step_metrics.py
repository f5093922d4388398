"""The numbers of a step that are computed from its samples."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from unittest.mock import create_autospec

import numpy as np
import pytest

from polyrl.sample import Purpose, SamplingParams
from polyrl_trainer.backend import StepResult
from polyrl_trainer.generation.supply import GroupPlan, StepGroups
from polyrl_trainer.generation.training_groups import TrainingGroups
from polyrl_trainer.loops.step_metrics import (
    StepClock,
    _staleness,
    duplicates_in_group,
    learning_metrics,
    separate_movement,
    solved_shares,
)
from polyrl_trainer.sample import Sample


def sample(group: int, *ids: int) -> Sample:
    tokens = np.array(ids, dtype=np.int64)
    return Sample(tokens, np.ones(len(ids), dtype=np.float32), prompt_length=0, group=group)


def test_duplicates_are_counted_within_groups_only() -> None:
    assert duplicates_in_group([sample(1, 5, 6), sample(1, 5), sample(2, 5, 6), sample(2, 5)]) == 0
    assert duplicates_in_group([sample(1, 5), sample(1, 5), sample(1, 5), sample(1, 6)]) == 0.5


def test_groups_are_too_easy_too_hard_or_teach_before_the_filter() -> None:
    rewarded = [(1, 1.0), (1, 0.0), (2, 0.5), (2, 0.5), (3, 0.0), (3, -1.0), (4, 0.0), (4, 0.0)]
    samples = [replace(sample(group, 5), reward=reward) for group, reward in rewarded]
    assert solved_shares(samples) == {"rollout/zero_std": 0.5, "rollout/solve_all": 0.25, "rollout/solve_none": 0.5}
    filtered = solved_shares(samples[:2], filtered=[[1.0, 1.0], [0.0, 0.0], [1.0, 2.0]])
    assert filtered == {"rollout/zero_std": 0.5, "rollout/solve_all": 0.25, "rollout/solve_none": 0.25}


def test_groups_whose_turns_were_paid_differently_teach() -> None:
    paid = [(1, (0.5, 0.0)), (1, ()), (2, (0.5, 0.0)), (2, (0.5, 0.0))]
    samples = [replace(sample(group, 5), reward=1.0, turn_rewards=turns) for group, turns in paid]
    assert solved_shares(samples) == {"rollout/zero_std": 0.5, "rollout/solve_all": 1.0, "rollout/solve_none": 0.0}


def test_lengths_turns_and_advantages_by_hand() -> None:
    # Turns of 2 and 1 tokens with a text of two tokens between them, and one of 5; prompts of 1 and 2 tokens.
    two = Sample(np.arange(6), np.array([0, 1, 1, 0, 0, 1], np.float32), prompt_length=1, group=1)
    one = Sample(np.arange(7), np.array([0, 0, 1, 1, 1, 1, 1], np.float32), prompt_length=2, group=1)
    samples = [replace(two, advantages=two.loss_mask * 2), replace(one, advantages=one.loss_mask * -1)]
    values = learning_metrics(samples, {"padding_fraction": 0.0}, [StepResult(1.0, 0.1)])
    assert [values[f"prompt_length/{name}"] for name in ("mean", "min", "max")] == [1.5, 1, 2]
    assert [values[f"num_turns/{name}"] for name in ("mean", "min", "max")] == [1.5, 1, 2]
    assert [values[f"turn_length/{name}"] for name in ("mean", "min", "max")] == [pytest.approx(8 / 3), 1, 5]
    assert [values[f"response_length/{name}"] for name in ("mean", "min", "max", "std")] == [5, 5, 5, 0]
    # Three tokens of 2 and five of -1: mean 1/8, mean square 17/8.
    found = [values[f"critic/advantages/{name}"] for name in ("mean", "min", "max", "std")]
    assert found == pytest.approx([0.125, -1, 2, (17 / 8 - 1 / 64) ** 0.5])


def test_spreads_come_from_means_of_squares() -> None:
    learned = {"ratio": 1.5, "ratio_square": 2.5, "correction_weight": 1.2, "correction_square": 1.6}
    values = learning_metrics([sample(1, 5)], {**learned, "padding_fraction": 0.0}, [StepResult(1.0, 0.1)])
    assert values["actor/ratio_std"] == 0.5
    assert values["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(0.9)
    assert values["rollout_corr/rollout_is_mean"] == 1.2


def test_what_the_device_did_is_of_its_passes_alone() -> None:
    learned = {"tokens": 100.0, "learn_seconds": 2.0, "flops": 6e12, "padding_fraction": 0.0}
    values = learning_metrics([sample(1, 5)], learned, [StepResult(1.0, 0.1)])
    assert values["perf/throughput_train"] == 50.0
    assert "perf/mfu/actor" not in values, "nobody knows what a CPU can do"
    assert values["perf/max_cpu_memory_used_gb"] > 0.01
    on_gpu = {**learned, "device_flops_max": 1e13, "device_allocated_max": 3e9, "device_reserved_max": 4e9}
    values = learning_metrics([sample(1, 5)], on_gpu, [StepResult(1.0, 0.1)])
    assert values["perf/mfu/actor"] == pytest.approx(0.3)
    assert (values["perf/max_memory_allocated_gb"], values["perf/max_memory_reserved_gb"]) == (3.0, 4.0)


def test_what_an_own_loss_counts_is_passed_on() -> None:
    values = learning_metrics([sample(1, 5)], {"loss/gate": 0.5, "padding_fraction": 0.0}, [StepResult(1.0, 0.1)])
    assert values["loss/gate"] == 0.5


def test_the_share_of_cut_samples_is_of_those_that_engines_ended() -> None:
    samples = [replace(sample(1, 5), finish_reason=reason) for reason in ("stop", "length", "stop", "stop")]
    steps = [StepResult(1.0, 0.1)]
    assert learning_metrics(samples, {"padding_fraction": 0.0}, steps)["response_length/clip_ratio"] == 0.25
    of_a_file = learning_metrics([sample(1, 5)], {"padding_fraction": 0.0}, steps)
    assert "response_length/clip_ratio" not in of_a_file


def test_a_penalty_for_length_is_a_number_only_where_the_algorithm_asks_for_one() -> None:
    learned, steps = {"padding_fraction": 0.0}, [StepResult(1.0, 0.1)]
    punished = [replace(sample(1, 5), penalty=penalty) for penalty in (0.0, -0.5)]
    assert learning_metrics(punished, learned, steps)["reward/overlong_penalty"] == -0.25
    assert "reward/overlong_penalty" not in learning_metrics([sample(1, 5)], learned, steps)


def test_movement_is_what_the_step_shows_more_than_its_first_mini_batch_and_called_an_estimate() -> None:
    learned = {"mismatch_k1": 0.5, "mismatch_k3": 0.4, "entropy": 1.0}
    separated = separate_movement(learned, {"mismatch_k1": 0.2, "mismatch_k3": 0.1})
    assert separated == {"mismatch_k1": 0.2, "mismatch_k3": 0.1, "moved_k1_estimate": 0.3, "entropy": 1.0}
    steps, padded = [StepResult(1.0, 0.1)], {"padding_fraction": 0.0}
    assert learning_metrics([sample(1, 5)], padded | separated, steps)["actor/ppo_kl_estimate"] == 0.3
    one_mini_batch = separate_movement(learned, {"mismatch_k1": 0.5, "mismatch_k3": 0.4})
    assert one_mini_batch == learned | {"moved_k1": 0.0}, "exactly: nothing has moved"
    recomputed = {**learned, "moved_k1": 0.7}
    assert separate_movement(recomputed, {"mismatch_k1": 0.2, "mismatch_k3": 0.1}) == recomputed


def test_a_step_that_was_skipped_gives_no_gradient_norm() -> None:
    steps = [StepResult(2.0, 0.1), StepResult(math.nan, 0.1, not_finite="w"), StepResult(4.0, 0.1)]
    values = learning_metrics([sample(1, 5)], {"padding_fraction": 0.0}, steps)
    assert values["actor/grad_norm"] == 3.0
    assert (values["actor/optimizer_steps"], values["actor/skipped_steps"]) == (2.0, 1.0)
    assert "actor/grad_norm" not in learning_metrics([sample(1, 5)], {"padding_fraction": 0.0}, steps[1:2])


@pytest.mark.parametrize(("generated_before", "has_tail"), [(5.0, False), (0.0, True)], ids=["ahead", "in the step"])
def test_only_what_is_generated_in_a_step_can_wait_for_its_rewards(generated_before: float, has_tail: bool) -> None:
    clock = StepClock()
    clock.submitted(time.monotonic() - 10.0)
    last_turn_at = time.monotonic() - generated_before
    with clock.waiting():
        pass
    clock.generated(last_turn_at, 1.0)
    assert (clock.reward_tail_s > 0) == has_tail
    assert clock.generate_s == 1.0
    assert clock.sequence_s == pytest.approx(10.0 - generated_before, abs=0.5), "since it was submitted"


@pytest.mark.parametrize(
    ("versions", "low", "expected"),
    [((7,), 7, 0), ((5, 6), 5, 2), ((6, 7), 5, 1), ((1,), 7, 0), ((1, 2), 5, 1)],
    ids=["the step's own", "two behind", "one behind", "trained again", "trained again, over two"],
)
def test_staleness_is_counted_from_the_step_and_for_what_is_trained_again_from_its_newest(
    versions: tuple[int, ...], low: int, expected: int
) -> None:
    plan = GroupPlan(
        step=1,
        purpose=Purpose.TRAIN,
        samples_per_group=1,
        sampling=SamplingParams(8),
        min_version=low,
        max_version=7,
        max_replaced=0,
    )
    own = create_autospec(StepGroups, instance=True, plan=plan)
    groups = TrainingGroups(1, own, carried=None, version=7)
    values = _staleness([replace(sample(1, 5), versions=versions)], groups)
    assert (values["rollout/staleness"], values["rollout/staleness_max"]) == (expected, expected)
    assert values["rollout/versions_per_sample"] == len(versions)
