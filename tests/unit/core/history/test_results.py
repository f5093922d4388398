"""What a run learned, from made rows."""

import pytest

from polyrl.history.results import (
    Course,
    courses,
    evaluations,
    milestones,
    rewards,
    samples_evaluated,
    samples_trained,
)
from polyrl.history.rows import MetricsRow


def row(phase: str, step: int, **values: float) -> MetricsRow:
    return MetricsRow(float(step), phase, step=step, values={name.replace("__", "/"): v for name, v in values.items()})


def rl(step: int, reward: float, **more: float) -> MetricsRow:
    return row("rl", step, reward__mean=reward, reward__std=9.0, rollout__samples=8, **more)


RUN = [
    row("eval", 0, eval__reward=0.0, eval__scored=16, eval__unscored=0),
    row("sft", 1, sft__loss=1.0),
    row("eval", 1, eval__reward=0.5, eval__scored=16, eval__unscored=0, timing_s__save_checkpoint=0.1),
    rl(1, 0.25, reward__style=1.0),
    rl(2, 0.5),
    row("eval", 2, eval__reward=0.6, eval__exact_match=0.5, eval__scored=15, eval__unscored=1),
    rl(3, 0.75, reward__style=3.0),
]


def test_the_course_of_the_reward_and_of_what_it_names() -> None:
    assert rewards(RUN) == [0.25, 0.5, 0.75]
    assert courses(RUN) == {
        "reward": Course(first=0.25, last=0.75, mean_of_steps=1),
        "style": Course(first=1.0, last=3.0, mean_of_steps=1),
    }
    assert courses(RUN[:3]) == {}


@pytest.mark.parametrize(("steps", "of"), [(1, 1), (19, 1), (20, 2), (100, 10), (500, 10)], ids=str)
def test_first_and_last_are_means_of_a_tenth(steps: int, of: int) -> None:
    course = courses([rl(step, float(step)) for step in range(1, steps + 1)])["reward"]
    middle = (of - 1) / 2
    assert course == Course(first=1 + middle, last=steps - middle, mean_of_steps=of)


def test_an_evaluation_belongs_to_the_stage_before_it() -> None:
    points = evaluations(RUN)
    assert [(point.stage, point.step) for point in points] == [("", 0), ("sft", 1), ("rl", 2)]
    assert points[1].values == {"reward": 0.5}, "a save within its row is no result"
    assert points[2].values == {"reward": 0.6, "exact_match": 0.5}
    assert milestones([*points, points[2]]) == points


def test_samples_are_trained_or_evaluated() -> None:
    assert (samples_trained(RUN), samples_evaluated(RUN)) == (24, 47)
