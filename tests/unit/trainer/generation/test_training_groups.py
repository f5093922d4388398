"""Which groups a step asks for, where an earlier one left some over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from polyrl.sample import Purpose, SamplingParams
from polyrl_trainer.generation.supply import GroupPlan, StepGroups
from polyrl_trainer.generation.training_groups import TrainingGroups


def groups_of(step: int, numbers: range, scored: set[int]) -> StepGroups:
    plan = GroupPlan(step, Purpose.TRAIN, 1, sampling=SamplingParams(8), min_version=0, max_version=1, max_replaced=0)
    rewards = SimpleNamespace(rewards_of=lambda number: [1.0] * (number in scored))
    nothing: Any = None
    supply: Any = SimpleNamespace(runner=rewards)
    return StepGroups(plan, nothing, supply=supply, live=dict.fromkeys(numbers, nothing))


@pytest.mark.parametrize(
    ("scored", "used", "carried_first", "most"),
    [
        pytest.param({0, 5, 6}, 0, True, 1, id="what is carried and complete waits already"),
        pytest.param({5, 6}, 0, False, 2, id="then the step's own, in places that what is carried leaves"),
        pytest.param({5, 6}, 2, True, 2, id="then what is carried and was not complete"),
    ],
)
def test_where_the_next_batch_comes_from(scored: set[int], used: int, carried_first: bool, most: int) -> None:
    own, carried = groups_of(2, range(4, 8), scored), groups_of(1, range(2), scored)
    groups = TrainingGroups(4, own, carried, version=1)
    groups.use(range(4, 4 + used))
    source, number = groups.next_source()
    assert (source is carried, number) == (carried_first, most)
