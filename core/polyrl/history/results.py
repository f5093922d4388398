"""What a run learned, from the trainer's rows alone: the course of the reward and of what it names, every evaluation.

The rows hold for the whole run, whoever wrote them: a trainer that was interrupted or killed leaves no result, and its
last evaluation is here all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from polyrl.history.rows import MetricsRow

TRAINED_PHASES: Final = ("rl", "offline-rl")
REWARD_PREFIX: Final = "reward/"
EVALUATION_PREFIX: Final = "eval/"
STATISTICS: Final = ("mean", "std", "min", "max")
"""Statistics of the reward; other names after the prefix are the reward function's own."""
COUNTS: Final = ("scored", "unscored")
"""Counts of an evaluation's samples; they are no result."""
SHARE_OF_STEPS: Final = 10
"""First and last are means over this part of the steps: one step of a few prompts is mostly chance."""
MOST_STEPS: Final = 10
"""Steps in such a mean."""


class Course(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """A number of training samples at the run's first and last steps."""

    first: float
    last: float
    mean_of_steps: int
    """Steps that each of the two is a mean of."""


class EvaluationPoint(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """One evaluation."""

    stage: str
    """Training stage before it: sft, rl; empty before any step."""
    step: int
    values: dict[str, float]
    """`reward`, and what the reward function names."""


def rewards(reports: Sequence[MetricsRow]) -> list[float]:
    """Mean reward of each step, in order."""
    return [row.values["reward/mean"] for row in reports if row.phase in TRAINED_PHASES and "reward/mean" in row.values]


def courses(reports: Sequence[MetricsRow]) -> dict[str, Course]:
    """The course of `reward`, and of each number that the reward function names."""
    steps = [row.values for row in reports if row.phase in TRAINED_PHASES]
    # In one pass: a received file may have another name in each of its rows.
    named: dict[str, list[float]] = {}
    for values in steps:
        for name, value in values.items():
            if name.startswith(REWARD_PREFIX):
                named.setdefault(name.removeprefix(REWARD_PREFIX), []).append(value)
    found = {"reward": _course(named.get("mean", []))}
    found |= {name: _course(named[name]) for name in sorted(named) if name not in STATISTICS}
    return {name: course for name, course in found.items() if course is not None}


def _course(values: Sequence[float]) -> Course | None:
    if not values:
        return None
    count = min(MOST_STEPS, max(1, len(values) // SHARE_OF_STEPS))
    first, last = sum(values[:count]) / count, sum(values[-count:]) / count
    return Course(first=round(first, 6), last=round(last, 6), mean_of_steps=count)


def evaluations(reports: Sequence[MetricsRow]) -> list[EvaluationPoint]:
    """All of them, in order."""
    found, stage = [], ""
    for row in reports:
        if row.phase != "eval":
            stage = row.phase
            continue
        # A save beside it adds its seconds to the row.
        own = {name: value for name, value in row.values.items() if name.startswith(EVALUATION_PREFIX)}
        named = {name.removeprefix(EVALUATION_PREFIX): value for name, value in own.items()}
        values = {name: value for name, value in named.items() if name.rpartition("/")[2] not in COUNTS}
        found.append(EvaluationPoint(stage=stage, step=row.step, values=values))
    return found


def milestones(points: Sequence[EvaluationPoint]) -> list[EvaluationPoint]:
    """The one before training, and the last one of each stage."""
    return list({point.stage: point for point in points}.values())


def samples_trained(reports: Sequence[MetricsRow]) -> int:
    """Samples of whole steps."""
    return sum(int(row.values.get("rollout/samples", 0)) for row in reports if row.phase == "rl")


def samples_evaluated(reports: Sequence[MetricsRow]) -> int:
    """Samples of whole evaluations."""
    return sum(
        int(value)
        for row in reports
        if row.phase == "eval"
        for name, value in row.values.items()
        if name.startswith(EVALUATION_PREFIX) and name.endswith("/scored")
    )
