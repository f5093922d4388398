"""The numbers of a step that are computed from its samples."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from polyrl_trainer.backend import StepResult
from polyrl_trainer.loops.step_metrics import duplicates_in_group, learning_metrics, separate_movement
from polyrl_trainer.sample import Sample


def sample(group: int, *ids: int) -> Sample:
    tokens = np.array(ids, dtype=np.int64)
    return Sample(tokens, np.ones(len(ids), dtype=np.float32), prompt_length=0, group=group)


def test_duplicates_are_counted_within_groups_only() -> None:
    assert duplicates_in_group([sample(1, 5, 6), sample(1, 5), sample(2, 5, 6), sample(2, 5)]) == 0
    assert duplicates_in_group([sample(1, 5), sample(1, 5), sample(1, 5), sample(1, 6)]) == 0.5


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


def test_movement_is_what_the_step_shows_more_than_its_first_mini_batch() -> None:
    learned = {"mismatch_k1": 0.5, "mismatch_k3": 0.4, "entropy": 1.0}
    separated = separate_movement(learned, {"mismatch_k1": 0.2, "mismatch_k3": 0.1})
    assert separated == {"mismatch_k1": 0.2, "mismatch_k3": 0.1, "moved_k1": 0.3, "entropy": 1.0}
    recomputed = {**learned, "moved_k1": 0.7}
    assert separate_movement(recomputed, {"mismatch_k1": 0.2, "mismatch_k3": 0.1}) == recomputed


def test_a_step_that_was_skipped_gives_no_gradient_norm() -> None:
    steps = [StepResult(2.0, 0.1), StepResult(math.nan, 0.1, not_finite="w"), StepResult(4.0, 0.1)]
    values = learning_metrics([sample(1, 5)], {"padding_fraction": 0.0}, steps)
    assert values["actor/grad_norm"] == 3.0
    assert (values["actor/optimizer_steps"], values["actor/skipped_steps"]) == (2.0, 1.0)
    assert "actor/grad_norm" not in learning_metrics([sample(1, 5)], {"padding_fraction": 0.0}, steps[1:2])
