"""How long generation takes with n engines, fitted to finished steps: a + b / n seconds.

b is work that engines share; a is what no engine shortens: the longest sample, the reward's tail. The manager reports b
of each step, by what its engines' batches and its queue were (`FinishedStep.shared_engine_seconds`); and steps with
differing numbers of engines show it. Both are believed as far as they are exact: b is where

    sum over steps of ((seconds - mean) - b * (1 / n - mean)) ** 2 / noise ** 2  +  (b - reported b) ** 2 / error ** 2

is least. So one step is enough to begin with, and what was seen overrules what was reported. The proportion of a and b
is taken from all kept steps, how much there is from the newest: a model's answers grow as it learns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from polyrl.status import FinishedStep

NOISE: Final = 0.08
"""Of a step's seconds, as a part of them: prompts differ."""

REPORT_ERROR: Final = 0.25
"""Of the reported b, as a part of it: what a ledger of known engines was seen to miss by where samples wait."""

LEAST_ERROR: Final = 0.02
"""The same as a part of all work: a b of 0 is not exact either."""

LEAST_STEP_GAIN: Final = 0.2
"""Growing by 1 % must shorten the step by 0.2 %, else it does not pay: the shared work must be a fifth of the step."""

FEWEST: Final = 1e-3
"""Engines in the mean: fewer are none."""

SHORTEST_S: Final = 1e-3
"""A time below this is not measured but rounded away."""

MOST: Final = 1024
"""No job may have more rollouts."""

ROUNDING: Final = 1e-9
"""A quotient this little above a whole number is that number."""


@dataclass(frozen=True)
class StepModel:
    """Seconds of generation with n engines: `fixed_s` + `shared_s` / n."""

    fixed_s: float
    shared_s: float

    def seconds(self, engines: float) -> float:
        """With that many."""
        return self.fixed_s + self.shared_s / engines if engines > 0 else math.inf

    def through(self, step: FinishedStep) -> StepModel:
        """The same proportion, at the level of that step."""
        level = step.rollout_seconds / max(ROUNDING, self.seconds(step.engines))
        return StepModel(self.fixed_s * level, self.shared_s * level)

    def wanted(self, train_s: float, rest_s: float, least_gain: float = LEAST_STEP_GAIN) -> int:
        """Engines with which generation keeps pace with training, or fewer where the next one does not pay. `rest_s`:
        of a step, what is neither."""
        room_s = train_s - self.fixed_s
        paced = self.shared_s / room_s if room_s > 0 else float(MOST)
        unshared_s = max(ROUNDING, self.fixed_s + rest_s)
        pays = self.shared_s * (1 - least_gain) / (least_gain * unshared_s)
        return math.ceil(min(MOST, paced - ROUNDING, max(1, math.floor(min(MOST, pays) + ROUNDING))))


def is_measure(step: FinishedStep) -> bool:
    """Whether it says what engines are worth."""
    return step.steady and step.engines >= FEWEST and step.rollout_seconds >= SHORTEST_S


def fit_steps(steps: Sequence[FinishedStep]) -> StepModel:
    """See above, over the median of each size, neither part below 0; `steps` are measures, one at least."""
    by_size: dict[int, list[FinishedStep]] = {}
    for one in steps:
        by_size.setdefault(one.size, []).append(one)
    points = [
        (fmean(1 / one.engines for one in those), median(one.rollout_seconds for one in those), len(those))
        for those in by_size.values()
    ]
    weight = sum(count for *_, count in points)
    mean_x = sum(x * count for x, _, count in points) / weight
    mean_y = sum(y * count for _, y, count in points) / weight
    whole = mean_y / mean_x
    reported = min(whole, max(0.0, median(one.shared_engine_seconds for one in steps)))
    noise, error = (NOISE * mean_y) ** 2, (REPORT_ERROR * reported + LEAST_ERROR * whole) ** 2
    seen = sum(count * (x - mean_x) * (y - mean_y) for x, y, count in points) / noise
    spread = sum(count * (x - mean_x) ** 2 for x, _, count in points) / noise
    shared = min(max(0.0, (seen + reported / error) / (spread + 1 / error)), whole)
    return StepModel(mean_y - shared * mean_x, shared)
