"""Pictures of a run as SVG text, to stand in a page: they scale with it, and their words stay words.

Drawn by hand: a manager draws them too, beside its work and within milliseconds, and needs no plotting library for it.
Names are foreign, so every text is escaped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from math import ceil, floor, log10
from typing import Any, Final

import numpy as np

from polyrl.history.fleet import WorkerLife
from polyrl.page.contents import Series

WIDTH: Final = 460
HEIGHT: Final = 210
"""At 400 px the text of a picture this wide is still read; beside each other two of them fill a large screen."""
LEFT: Final = 44
RIGHT: Final = 8
TOP: Final = 22
BOTTOM: Final = 34
"""Room for labels around the axes."""
LEGEND_ROW: Final = 12
LABEL_CHARS: Final = 24
"""Most characters of a worker's name beside its row."""
COLORS: Final = ("#2563eb", "#059669", "#d97706", "#64748b", "#9333ea", "#db2777")
LOSS_COLOR: Final = "#dc2626"
STARTING_COLOR: Final = "#cbd5e1"
SERVING_COLOR: Final = "#2563eb"
GRID_COLOR: Final = "#e5e7eb"
MAX_POINTS: Final = 400
"""Most points of a line, more than a picture has columns for. Longer runs are drawn as means of neighbouring steps."""
SMOOTHED_FROM: Final = 20
"""Points from which on a moving average is drawn above the single ones."""
SMOOTHING_SHARE: Final = 20
"""The average is over this part of all points."""
MAX_NAMED_WORKERS: Final = 30
"""Rows with names; more of them would overlap."""
MAX_ROWS_HEIGHT: Final = 430
ROW_HEIGHT: Final = 13
TICKS: Final = 5


class Axes:
    """A frame with scales, to which shapes are added; `svg` is all of it."""

    def __init__(
        self,
        across: str,
        x: tuple[float, float],
        y: tuple[float, float],
        height: int = HEIGHT,
        left: int = LEFT,
        names: Sequence[tuple[str, str]] = (),
    ) -> None:
        """`names`: the legend, each name with its color, in as many rows above the picture as it needs."""
        self._left, self._height = left, height
        self._x, self._y = (x[0], x[1] if x[1] > x[0] else x[0] + 1), (y[0], y[1] if y[1] > y[0] else y[0] + 1)
        self._parts: list[str] = []
        self._top = TOP + LEGEND_ROW * self._legend(names)
        self._text((left + WIDTH - RIGHT) / 2, height - 4, across, anchor="middle")
        for tick in nice_ticks(*self._x):
            self._text(self.x(tick), height - BOTTOM + 14, f"{tick:g}", anchor="middle")

    def x(self, value: float) -> float:
        low, high = self._x
        return self._left + (value - low) / (high - low) * (WIDTH - RIGHT - self._left)

    def y(self, value: float) -> float:
        low, high = self._y
        return self._height - BOTTOM - (value - low) / (high - low) * (self._height - BOTTOM - self._top)

    def grid(self) -> None:
        """Lines at even values, with the values beside them."""
        for tick in nice_ticks(*self._y):
            at = self.y(tick)
            self._parts.append(f'<path d="M{self._left} {at:.1f}H{WIDTH - RIGHT}" stroke="{GRID_COLOR}"/>')
            self._text(self._left - 4, at + 3, f"{tick:g}", anchor="end")

    def line(self, steps: Any, values: Any, color: str, width: float, **style: str) -> None:
        points = " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in zip(steps, values, strict=True))
        extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
        self._parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}"{extra}/>')

    def area(self, steps: Any, below: Any, above: Any, color: str) -> None:
        around = [*zip(steps, above, strict=True), *zip(steps[::-1], below[::-1], strict=True)]
        points = " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in around)
        self._parts.append(f'<polygon points="{points}" fill="{color}"/>')

    def dots(self, steps: Any, values: Any, color: str) -> None:
        for step, value in zip(steps, values, strict=True):
            self._parts.append(f'<circle cx="{self.x(step):.1f}" cy="{self.y(value):.1f}" r="2.5" fill="{color}"/>')

    def bar(self, row: int, since: float, until: float, color: str) -> None:
        """Draws a bar, nearly as high as its row, from `since` to `until`."""
        top, bottom = self.y(row + 0.15), self.y(row + 0.85)
        width = max(0.5, self.x(until) - self.x(since))
        place = f'x="{self.x(since):.1f}" y="{min(top, bottom):.1f}"'
        self._parts.append(f'<rect {place} width="{width:.1f}" height="{abs(top - bottom):.1f}" fill="{color}"/>')

    def cross(self, row: int, at: float) -> None:
        x, y = self.x(at), self.y(row + 0.5)
        path = f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"
        self._parts.append(f'<path d="{path}" stroke="{LOSS_COLOR}" stroke-width="2" fill="none"/>')

    def row_label(self, row: int, name: str) -> None:
        shown = name if len(name) <= LABEL_CHARS else f"{name[: LABEL_CHARS - 1]}…"
        self._text(self._left - 4, self.y(row + 0.5) + 3, shown, anchor="end", size=7)

    def _legend(self, names: Sequence[tuple[str, str]]) -> int:
        """Draws it; how many rows it takes beyond the first."""
        x, row = float(self._left), 0
        for name, color in names:
            width = 22 + 4.6 * len(name)
            if x > self._left and x + width > WIDTH:
                x, row = float(self._left), row + 1
            y = 8 + LEGEND_ROW * row
            self._parts.append(f'<rect x="{x:.0f}" y="{y}" width="8" height="8" fill="{color}"/>')
            self._text(x + 11, y + 7, name)
            x += width
        return row

    def svg(self) -> str:
        box = f'viewBox="0 0 {WIDTH} {self._height}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" fill="#334155">' + (
            "".join(self._parts) + "</svg>"
        )

    def _text(self, x: float, y: float, text: str, anchor: str = "start", size: int = 9) -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
        self._parts.append(f"<text {place}>{escape(text)}</text>")


def nice_ticks(low: float, high: float) -> list[float]:
    """About TICKS values of one digit's step within the bounds."""
    rough = (high - low) / TICKS
    unit = 10.0 ** floor(log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
    return [round(number * step, 12) for number in range(ceil(low / step), floor(high / step) + 1)]


def lines_chart(series: Sequence[Series], across: str) -> str:
    """One line per series, with single points behind their moving average."""
    drawn = [(one, *binned(one)) for one in series]
    names = [(one.name, color) for one, color in zip(series, COLORS, strict=False)]
    reach, extent = _bounds([steps for _, steps, _ in drawn]), _bounds([values for _, _, values in drawn], 0.05)
    axes = Axes(across, reach, extent, names=names)
    axes.grid()
    for color, (one, steps, values) in zip(COLORS, drawn, strict=False):
        if len(values) < SMOOTHED_FROM or one.few:
            axes.line(steps, values, color, 1.6)
        else:
            axes.line(steps, values, color, 0.8, stroke_opacity="0.3")
            axes.line(steps, _averaged(values), color, 1.8)
        if one.few or len(values) == 1:
            axes.dots(steps, values, color)
    return axes.svg()


def stacked_chart(parts: Sequence[Series], line: Series | None, across: str) -> str:
    """Parts of one whole on top of each other, and another measure as a line across them."""
    drawn = [binned(part) for part in parts]
    steps, tops = drawn[0][0], np.cumsum([values for _, values in drawn], axis=0)
    crossing = binned(line) if line is not None else (steps, tops[-1])
    names = [(part.name, color) for part, color in zip(parts, COLORS, strict=False)]
    names += [(line.name, "#000")] if line is not None else []
    highest = float(max(tops[-1].max(), crossing[1].max(), 1e-6)) * 1.05
    axes = Axes(across, _bounds([steps]), (0.0, highest), names=names)
    below = np.zeros(len(steps))
    for color, above in zip(COLORS, tops, strict=False):
        axes.area(steps, below, above, color)
        below = above
    axes.grid()
    if line is not None:
        axes.line(*crossing, "#000", 1, stroke_dasharray="4 2")
    return axes.svg()


def fleet_chart(lives: Sequence[WorkerLife], until: float) -> str:
    """A row per rollout: when it started, when it served, and where it was taken away; one that came back under its
    name goes on in its row."""
    rows = {worker: -1 - number for number, worker in enumerate(dict.fromkeys(life.worker for life in lives))}
    named = len(rows) <= MAX_NAMED_WORKERS
    left = 12 + int(4.2 * min(max(map(len, rows), default=0), LABEL_CHARS)) if named else LEFT
    height = min(TOP + BOTTOM + ROW_HEIGHT * max(len(rows), 4), MAX_ROWS_HEIGHT)
    # The first row on top: the scale is turned around.
    names = () if named else ((f"{len(rows)} rollouts", SERVING_COLOR),)
    axes = Axes("seconds since the start", (0.0, until), (-len(rows), 0.0), height=height, left=left, names=names)
    for life in lives:
        row, ended = rows[life.worker], until if life.ended is None else life.ended
        axes.bar(row, life.started, ended if life.serving is None else life.serving, STARTING_COLOR)
        if life.serving is not None:
            axes.bar(row, life.serving, ended, SERVING_COLOR)
    for worker, row in rows.items() if named else ():
        axes.row_label(row, worker)
    for life in lives:
        if life.reclaimed and life.ended is not None:
            axes.cross(rows[life.worker], life.ended)
    return axes.svg()


def binned(series: Series) -> tuple[Any, Any]:
    """The series' points, at most MAX_POINTS of them: means over neighbours of equal number."""
    steps, values = np.asarray(series.steps, float), np.asarray(series.values, float)
    if len(steps) <= MAX_POINTS:
        return steps, values
    edges = np.linspace(0, len(steps), MAX_POINTS + 1).astype(int)
    return tuple(np.asarray([(steps[low:high].mean(), values[low:high].mean()) for low, high in pairwise(edges)]).T)


def _averaged(values: Any) -> Any:
    """Mean over the neighbours on both sides; at the ends over those that there are."""
    width = max(3, len(values) // SMOOTHING_SHARE)
    kernel = np.ones(width)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def _bounds(arrays: Sequence[Any], margin: float = 0.0) -> tuple[float, float]:
    low, high = (float(of(array)) for of, array in ((min, np.concatenate(arrays)), (max, np.concatenate(arrays))))
    room = (high - low) * margin or abs(high) * margin
    return low - room, high + room
