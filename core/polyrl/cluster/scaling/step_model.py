"""How long generation takes with n engines, fitted to finished steps: a + b / n seconds.

b is work that engines share; a is what no engine shortens: the longest sample, the reward's tail. The manager reports b
of each step, by what its engines' batches and its queue were (`FinishedStep.shared_engine_seconds`); and steps with
differing numbers of engines show it. But a model's answers also grow as it learns, and fleets with them: more engines
and longer steps are no sign that engines do not help. So steps may grow by d seconds each. All of it is believed as far
as it is exact: b and d are where

    sum over steps of ((seconds - mean) - b * (1 / n - mean) - d * (step - mean)) ** 2 / noise ** 2
        +  (b - reported b) ** 2 / error ** 2  +  d ** 2 / drift ** 2

is least. So one step is enough to begin with, and what was seen overrules what was reported. The proportion of a and b
is taken from all kept steps, how much there is from the newest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

import numpy as np

from polyrl.status import FinishedStep

NOISE: Final = 0.08
"""Of a step's seconds, as a part of them: prompts differ."""

REPORT_ERROR: Final = 0.25
"""Of the reported b, as a part of it: what a ledger of known engines was seen to miss by where samples wait."""

LEAST_ERROR: Final = 0.02
"""The same as a part of all work: a b of 0 is not exact either."""

DRIFT: Final = 0.01
"""By how much of itself a step grows or shrinks from the one before, as answers do: a doubling in 70 steps, which short
runs have seen. With none a fleet shrank while its work grew, and steps took up to twice as long as they had to."""

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
    """See above, neither part below 0; `steps` are measures, one at least. Steps of one size count as their median, so
    that one that was no ordinary step does not move it."""
    by_size: dict[int, list[FinishedStep]] = {}
    for one in steps:
        by_size.setdefault(one.size, []).append(one)
    sizes = by_size.values()
    counts = np.array([len(those) for those in sizes])
    share = np.array([fmean(1 / one.engines for one in those) for those in sizes])
    seconds = np.array([median(one.rollout_seconds for one in those) for those in sizes])
    number = np.array([fmean(one.step for one in those) for those in sizes])
    mean_share, mean_s, mean_number = (np.average(column, weights=counts) for column in (share, seconds, number))
    whole = float(mean_s / mean_share)
    reported = min(whole, max(0.0, median(one.shared_engine_seconds for one in steps)))
    # Each row in units of its own error.
    exact, error = np.sqrt(counts) / (NOISE * mean_s), REPORT_ERROR * reported + LEAST_ERROR * whole
    rows = [
        *np.column_stack([exact * (share - mean_share), exact * (number - mean_number)]),
        (1 / error, 0.0),
        (0.0, 1 / (DRIFT * mean_s)),
    ]
    (found, _), *_ = np.linalg.lstsq(np.array(rows), np.array([*exact * (seconds - mean_s), reported / error, 0.0]))
    shared = min(max(0.0, float(found)), whole)
    return StepModel(float(mean_s - shared * mean_share), shared)
