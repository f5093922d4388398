"""How long engines took for a step, when several are open at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from polyrl_trainer.generation.steps_ahead import StepsAhead


def ahead(k: int, submitted: dict[int, float]) -> StepsAhead:
    recipe: Any = SimpleNamespace(algorithm=SimpleNamespace(max_staleness=k))
    nothing: Any = None
    steps = StepsAhead(recipe, nothing, prompts=nothing, sampling=nothing)
    steps._submitted_at.update(submitted)
    return steps


@pytest.mark.parametrize(
    ("k", "submitted", "ended", "expected"),
    [
        pytest.param(0, [0, 10, 25], [8, 22, 29], [8, 12, 4], id="one after the other"),
        pytest.param(1, [0, 0, 10], [10, 8, 18], [10, 5, 4], id="the second was done before the first"),
        pytest.param(1, [0, 0, 10, 20], [10, 20, 30, 40], [10, 10, 10, 10], id="engines are always busy"),
        pytest.param(1, [0, 0, 30, 60], [4, 8, 34, 64], [4, 4, 4, 4], id="engines wait for the learner"),
    ],
)
def test_seconds_of_generating_a_step(
    k: int, submitted: list[float], ended: list[float], expected: list[float]
) -> None:
    steps = ahead(k, dict(enumerate(submitted)))
    assert [steps.generate_s(step, at) for step, at in enumerate(ended)] == expected


def test_what_an_earlier_trainer_left_is_in_no_mean() -> None:
    """It was there at once: with three steps ahead the next three steps seemed to take a third of their time."""
    steps = ahead(1, dict(enumerate([0.0, 0.0, 1.0, 3.0])))
    assert steps.generate_s(0, 0.0, was_left=True) == 0.0
    assert steps.generate_s(1, 2.0, was_left=True) == 2.0
    assert [steps.generate_s(2, 12.0), steps.generate_s(3, 22.0)] == [10.0, 10.0]
