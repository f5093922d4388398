"""Learning curves of several seeds side by side: means at equal steps, and whether their difference is seed noise.

A curve is a run's reward, averaged over as many windows of steps as a table has columns. Two sides are compared window
by window by Welch's t: the difference of their means over the standard error that the spread over seeds gives. With
three seeds a side |t| has about four degrees of freedom, and T_BOUND is what chance passes in one of a hundred windows.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

Curve: TypeAlias = Sequence[float]
WINDOWS: Final = 4
T_BOUND: Final = 4.6
"""Two-sided 1 % of Student's t at four degrees of freedom."""
NOISE_FLOOR: Final = 0.005
"""Standard error of a mean below which three seeds that agree by chance would make any difference one: 0.005 of a
success rate is what 10,000 draws leave."""


def windowed(rewards: Sequence[float], windows: int = WINDOWS) -> list[float]:
    """Means of `windows` equal parts."""
    if len(rewards) < windows:
        raise ValueError(f"{len(rewards)} steps make no {windows} windows")
    cuts = [round(part * len(rewards) / windows) for part in range(windows + 1)]
    return [statistics.mean(rewards[begin:end]) for begin, end in itertools.pairwise(cuts)]


def t_of(ours: Curve, theirs: Curve) -> float:
    """Welch's t of two sides' values over seeds; two values a side at least."""
    error = math.sqrt(statistics.variance(ours) / len(ours) + statistics.variance(theirs) / len(theirs))
    return (statistics.mean(ours) - statistics.mean(theirs)) / max(error, NOISE_FLOOR)


def is_seed_noise(ours: Sequence[Curve], theirs: Sequence[Curve]) -> bool:
    """Whether no window of two sides' curves differs by more than seeds do."""
    return all(abs(t) <= T_BOUND for t in scores(ours, theirs))


def scores(ours: Sequence[Curve], theirs: Sequence[Curve]) -> list[float]:
    """Welch's t of each window."""
    return [round(t_of(a, b), 2) for a, b in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)]


def table(sides: Mapping[str, Sequence[Curve]], steps: int, base: str) -> str:
    """One row a side: mean and standard deviation over seeds of each window, and t against `base`."""
    width = steps / WINDOWS
    heads = [f"{round(part * width) + 1}-{round((part + 1) * width)}" for part in range(WINDOWS)]
    lines = [f"{'reward at steps':18}" + "".join(f"{head:>16}" for head in heads) + f"   t against {base}"]
    for name, curves in sides.items():
        cells = [f"{statistics.mean(of):.3f} ± {_spread(of):.3f}" for of in zip(*curves, strict=True)]
        against = "" if name == base or len(curves) < 2 else " ".join(map(str, scores(curves, sides[base])))
        lines.append(f"{name:18}" + "".join(f"{cell:>16}" for cell in cells) + f"   {against}")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
