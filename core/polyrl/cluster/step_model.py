"""How long generation takes with n engines, fitted to finished steps: a + b / n seconds.

b is work that engines share; a is what no engine shortens: the longest sample, the reward's tail. One size alone does
not tell the two apart, and a counts as 0 until another size was seen. So of each size the newest steps are kept. Their
proportion is taken from all of them, how much there is from the newest step: a model's answers grow as it learns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

STEPS_PER_SIZE: Final = 4
"""Steps kept of each size: one that was no ordinary step does not move their median."""

SIZES: Final = 16
"""Sizes kept, the newest seen: enough to see a curve, few enough to forget what the model wrote long ago."""

LEAST_STEP_GAIN: Final = 0.2
"""Growing by 1 % must shorten the step by 0.2 %, else it does not pay: the shared work must be a fifth of the step."""

MOST: Final = 1024
"""No job may have more rollouts."""

ROUNDING: Final = 1e-9
"""A quotient this little above a whole number is that number."""


@dataclass(frozen=True)
class SeenStep:
    """One measured step."""

    engines: float
    """Mean number that generated, the reserved engine's part included."""
    rollout_s: float

    @property
    def size(self) -> int:
        """Steps of one size are a point of the fit."""
        return round(self.engines)


@dataclass(frozen=True)
class StepModel:
    """Seconds of generation with n engines: `fixed_s` + `shared_s` / n."""

    fixed_s: float
    shared_s: float

    def seconds(self, engines: float) -> float:
        """With that many."""
        return self.fixed_s + self.shared_s / engines if engines > 0 else math.inf

    def through(self, step: SeenStep) -> StepModel:
        """The same proportion, at the level of that step."""
        level = step.rollout_s / max(ROUNDING, self.seconds(step.engines))
        return StepModel(self.fixed_s * level, self.shared_s * level)

    def wanted(self, train_s: float, rest_s: float, least_gain: float = LEAST_STEP_GAIN) -> int:
        """Engines with which generation keeps pace with training, or fewer where the next one does not pay. `rest_s`:
        of a step, what is neither."""
        room_s = train_s - self.fixed_s
        paced = self.shared_s / room_s if room_s > 0 else float(MOST)
        unshared_s = max(ROUNDING, self.fixed_s + rest_s)
        pays = self.shared_s * (1 - least_gain) / (least_gain * unshared_s)
        return math.ceil(min(MOST, paced - ROUNDING, max(1, math.floor(min(MOST, pays) + ROUNDING))))


def keep_step(seen: Sequence[SeenStep], step: SeenStep) -> tuple[SeenStep, ...]:
    """`seen` with another step, newest last, within bounds."""
    of_size = [one for one in seen if one.size == step.size][-(STEPS_PER_SIZE - 1) :]
    others = [one for one in seen if one.size != step.size]
    sizes = list(dict.fromkeys(one.size for one in reversed(others)))[: SIZES - 1]
    return (*(one for one in others if one.size in sizes), *of_size, step)


def fit_steps(seen: Sequence[SeenStep]) -> StepModel:
    """Least squares over the median of each size, neither part below 0; `seen` is not empty."""
    by_size: dict[int, list[SeenStep]] = {}
    for one in seen:
        by_size.setdefault(one.size, []).append(one)
    points = [
        (fmean(1 / one.engines for one in those), median(one.rollout_s for one in those), len(those))
        for those in by_size.values()
    ]
    weight = sum(count for *_, count in points)
    mean_x = sum(x * count for x, _, count in points) / weight
    mean_y = sum(y * count for _, y, count in points) / weight
    spread = sum(count * (x - mean_x) ** 2 for x, _, count in points)
    if len(points) == 1 or spread <= 0:
        return StepModel(0.0, mean_y / mean_x)
    slope = sum(count * (x - mean_x) * (y - mean_y) for x, y, count in points) / spread
    slope = min(max(0.0, slope), mean_y / mean_x)
    return StepModel(mean_y - slope * mean_x, slope)
