"""How long generation takes with n engines, fitted to finished steps: a + b / n seconds.

b is work that engines share; a is what no engine shortens: the longest sample, the reward's tail. The manager reports b
of each step, by what its engines' batches and its queue were (`FinishedStep.shared_engine_seconds`); and steps with
differing numbers of engines show it. But a model's answers also grow as it learns, and fleets with them: more engines
and longer steps are no sign that engines do not help. So steps may grow by d seconds each. All of it is believed as far
as it is exact: b and d are where

    sum over steps of ((seconds - mean) - b * (1 / n - mean) - d * (step - mean)) ** 2 / noise ** 2
        +  (b - reported b) ** 2 / error ** 2  +  d ** 2 / drift ** 2

is least. So one step is enough to begin with, and what was seen overrules what was reported. A step far from where the
others lie, as by one very long answer, counts little; one of long ago, not at all: a new curriculum is another model.
The proportion of a and b is taken from all that count, how much there is from the median of the newest few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from polyrl.status import FinishedStep

NOISE: Final = 0.08
"""Noise of a step's seconds, as a part of them: prompts differ."""

REPORT_ERROR: Final = 0.25
"""Error of the reported b, as a part of it: what a ledger of known engines was seen to miss by where samples wait."""

LEAST_ERROR: Final = 0.02
"""The same as a part of all work: a b of 0 is not exact either."""

DRIFT: Final = 0.01
"""By how much of itself a step grows or shrinks from the one before, as answers do: a doubling in 70 steps, which short
runs have seen. With none a fleet shrank while its work grew, and steps took up to twice as long as they had to."""

REMEMBERED_STEPS: Final = 16
"""A fit is of the newest so many. With all of them a step took half as long again as it had to, 75 steps after the work
had trebled."""

USUAL_STEPS: Final = 5
"""Newest steps whose median says what a step takes: one step in ten that takes several times as long, or in which
training takes half, moves nothing. What lasts is answered two steps later."""

FAR: Final = 3.0
"""Distance from the fit, in units of noise, from which on a step counts less than half."""

ROUNDS: Final = 5
"""Rounds of weighing steps by their distance from the fit and fitting them again; further ones change little."""

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
        """Seconds of generation with that many engines."""
        return self.fixed_s + self.shared_s / engines if engines > 0 else math.inf

    def through(self, *steps: FinishedStep) -> StepModel:
        """The same proportion, at the level of most of those steps."""
        level = median(one.rollout_seconds / max(ROUNDING, self.seconds(one.engines)) for one in steps)
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
    """Whether a step says what engines are worth."""
    return step.steady and step.engines >= FEWEST and step.rollout_seconds >= SHORTEST_S


def measures(steps: Sequence[FinishedStep]) -> list[FinishedStep]:
    """Those of `steps` that say what engines are worth (see `is_measure`), without steps of long ago."""
    return [one for one in steps if is_measure(one) and one.step > steps[-1].step - REMEMBERED_STEPS]


def fit_steps(steps: Sequence[FinishedStep]) -> StepModel:
    """See above, neither part below 0; `steps` are measures, one at least."""
    table = np.array([(1 / one.engines, one.step, one.rollout_seconds) for one in steps])
    weights = np.ones(len(steps))
    reported = median(one.shared_engine_seconds for one in steps)
    for _ in range(ROUNDS):
        means = weights @ table / weights.sum()
        mean_share, _, mean_s = means.tolist()
        whole = mean_s / mean_share
        credible = min(whole, max(0.0, reported))
        # Each row in units of its own error.
        error, unit = REPORT_ERROR * credible + LEAST_ERROR * whole, NOISE * mean_s
        rows = (table - means) / unit
        squares = rows.T @ (weights[:, None] * rows)
        squares[0] += (1 / error**2, 0.0, credible / error**2)
        squares[1, 1] += 1 / (DRIFT * mean_s) ** 2
        found = np.linalg.solve(squares[:2, :2], squares[:2, 2])
        off = rows[:, 2] - rows[:, :2] @ found
        weights = 1 / (1 + (off - median(off.tolist())) ** 2 / FAR**2)
    shared = min(max(0.0, float(found[0])), whole)
    return StepModel(mean_s - shared * mean_share, shared)
