"""Pictures of a run as SVG text, to stand in a page: they scale with it, and their words stay words."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import matplotlib
import numpy as np

from polyrl.history.fleet import WorkerLife
from polyrl_cli.page.contents import Loss, Series

matplotlib.use("Agg")  # before pyplot searches for a display

from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator

# Names are foreign: a pair of dollars in one is no formula. Words stay words; equal runs give equal ids.
matplotlib.rcParams.update({"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "polyrl"})

WIDTH_IN: Final = 6.4
HEIGHT_IN: Final = 2.9
"""At 400 px the text of a picture this wide is still read; beside each other two of them fill a large screen."""
COLORS: Final = ("#2563eb", "#059669", "#d97706", "#64748b", "#9333ea", "#db2777")
LOSS_COLOR: Final = "#dc2626"
STARTING_COLOR: Final = "#cbd5e1"
SERVING_COLOR: Final = "#2563eb"
GRID_COLOR: Final = "#e5e7eb"
MAX_POINTS: Final = 400
"""Of one line: more than a picture has columns for. Longer runs are drawn as means of neighbouring steps."""
SMOOTHED_FROM: Final = 20
"""Points from which on a moving average is drawn above the single ones."""
SMOOTHING_SHARE: Final = 20
"""The average is over this part of all points."""
MAX_NAMED_WORKERS: Final = 30
"""Rows with names; more of them would overlap."""


def lines_chart(series: Sequence[Series], across: str) -> str:
    """One line per series, with single points behind their moving average."""
    figure, axes = _axes(across)
    for color, one in zip(COLORS, series, strict=False):
        steps, values = binned(one)
        if one.few:
            axes.plot(steps, values, color=color, marker="o", markersize=3, linewidth=1.4, label=one.name)
        elif len(values) < SMOOTHED_FROM:
            axes.plot(steps, values, color=color, linewidth=1.6, label=one.name)
        else:
            axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
            axes.plot(steps, _averaged(values), color=color, linewidth=1.8, label=one.name)
    _legend(axes)
    return _svg(figure)


def stacked_chart(parts: Sequence[Series], line: Series | None, across: str) -> str:
    """Parts of one whole on top of each other, and another measure as a line across them."""
    figure, axes = _axes(across)
    drawn = [binned(part) for part in parts]
    axes.stackplot(drawn[0][0], *(values for _, values in drawn), labels=[part.name for part in parts], colors=COLORS)
    if line is not None:
        axes.plot(*binned(line), color="black", linewidth=1, linestyle=(0, (4, 2)), label=line.name)
    axes.margins(x=0)
    _legend(axes)
    return _svg(figure)


def fleet_chart(lives: Sequence[WorkerLife], losses: Sequence[Loss], until: float) -> str:
    """A row per rollout: when it started, when it served, and where it was taken away."""
    figure, axes = _axes("seconds since the start", height=min(max(1.6, 0.6 + 0.17 * len(lives)), 6.0))
    for row, life in enumerate(lives):
        served = life.ended if life.serving is None else life.serving
        axes.barh(row, (served or until) - life.started, left=life.started, color=STARTING_COLOR, height=0.7)
        if life.serving is not None:
            axes.barh(row, (life.ended or until) - life.serving, left=life.serving, color=SERVING_COLOR, height=0.7)
    rows = {life.worker: row for row, life in enumerate(lives)}
    marked = [(loss.at, rows[loss.worker]) for loss in losses if loss.worker in rows]
    axes.scatter(*zip(*marked, strict=True) if marked else ((), ()), color=LOSS_COLOR, marker="x", zorder=3, s=36)
    if len(lives) <= MAX_NAMED_WORKERS:
        axes.set_yticks(range(len(lives)), [life.worker for life in lives], fontsize=7)
    else:
        axes.set_ylabel(f"{len(lives)} rollouts")
    axes.invert_yaxis()
    return _svg(figure)


def binned(series: Series) -> tuple[Any, Any]:
    """The series' points, at most MAX_POINTS of them: means over neighbours of equal number."""
    steps, values = np.asarray(series.steps, float), np.asarray(series.values, float)
    if len(steps) <= MAX_POINTS:
        return steps, values
    edges = np.linspace(0, len(steps), MAX_POINTS + 1).astype(int)
    means = [(steps[low:high].mean(), values[low:high].mean()) for low, high in pairwise(edges)]
    return tuple(np.asarray(means).T)


def _averaged(values: Any) -> Any:
    """Mean over the neighbours on both sides; at the ends over those that there are."""
    width = max(3, len(values) // SMOOTHING_SHARE)
    kernel = np.ones(width)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def _axes(across: str, height: float = HEIGHT_IN) -> tuple[Any, Any]:
    figure, axes = pyplot.subplots(figsize=(WIDTH_IN, height), constrained_layout=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GRID_COLOR, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(across)
    if across.endswith("step"):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)


def _svg(figure: Any) -> str:
    """The figure as an element; the XML declaration before it has no place in a page."""
    out = io.StringIO()
    with warnings.catch_warnings():
        # What the font here lacks, the reader's browser has.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    pyplot.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]
