"""One picture of a run: reward and exact match above, the serving rollouts below, every loss marked. And one of several
runs: reward and evaluations by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

# Not pyplot, which looks for a display and keeps every figure until it is closed.
from matplotlib.figure import Figure

from polyrl.history.fleet import FLEET, RECLAIMED, FleetEvent
from polyrl.history.foreign_text import printable
from polyrl.history.rows import MetricsRow
from polyrl_cli.report.progress import EVALUATED, EXACT_MATCH, REWARD

REWARD_COLOR: Final = "#2563eb"
EVAL_COLOR: Final = "#059669"
FLEET_COLOR: Final = "#64748b"
LOSS_COLOR: Final = "#dc2626"
GRID_COLOR: Final = "#e5e7eb"
SMOOTHING: Final = 0.3
"""Weight of a new reward in the drawn average; the single steps stay visible behind it."""

MAX_LABELS: Final = 100
"""Labels of losses, and as many of evaluations: nobody can read more, and each takes matplotlib milliseconds."""
LABEL_CHARS: Final = 60


def draw_run(title: str, reports: Sequence[MetricsRow], events: Sequence[FleetEvent], file: Path) -> None:
    """Draws the picture into `file`."""
    began = min([report.time for report in reports[:1]] + [event.time for event in events[:1]], default=0.0)
    figure = Figure(figsize=(10, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    _draw_learning(above, reports, began)
    _draw_fleet(below, events, began, max((report.time for report in reports), default=began) - began)
    _mark_losses(above, below, events, began)
    above.set_title(title, loc="left", fontsize=14, fontweight="bold")
    for axes in (above, below):
        _make_plain(axes)
    if above.get_legend_handles_labels()[0]:
        above.legend(loc="lower right", frameon=False)
    figure.savefig(file, dpi=120)


def draw_comparison(runs: Mapping[str, Sequence[MetricsRow]], file: Path) -> None:
    """Draws the rewards of several runs over their steps into `file`, in the format that its ending names; evaluations
    are dots. Raises ValueError for an ending that names none, OSError when it cannot be written."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    for name, rows in runs.items():
        steps = [row for row in rows if REWARD in row.values]
        values = [row.values[REWARD] for row in steps]
        (line,) = axes.plot([row.step for row in steps], _smoothed(values), linewidth=2, label=name)
        points = _evaluations_after_rl(rows)
        axes.plot([step for step, _ in points], [value for _, value in points], "o", color=line.get_color())
    axes.set_xlabel("RL step")
    axes.set_ylabel("reward; dots: evaluation")
    _make_plain(axes)
    for text in axes.legend(loc="lower right", frameon=False).get_texts():
        text.set_parse_math(False)  # a folder's name may hold dollars
    figure.savefig(file, dpi=120)


def _evaluations_after_rl(rows: Sequence[MetricsRow]) -> list[tuple[int, float]]:
    """The evaluations on the axis of RL steps, of whatever is shown of evaluations."""
    begun = next((index for index, row in enumerate(rows) if REWARD in row.values), len(rows))
    name = _evaluated(rows)
    return [(row.step, row.values[name]) for row in rows[begun:] if name in row.values]


def _evaluated(reports: Sequence[MetricsRow]) -> str:
    return next((name for name in EVALUATED if any(name in row.values for row in reports)), EXACT_MATCH)


def _make_plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GRID_COLOR, linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_learning(axes: Any, reports: Sequence[MetricsRow], began: float) -> None:
    times, rewards = _series(reports, REWARD, began)
    if rewards:
        axes.plot(times, rewards, color=REWARD_COLOR, alpha=0.25, linewidth=1)
        axes.plot(times, _smoothed(rewards), color=REWARD_COLOR, linewidth=2, label="reward of training samples")
    name = _evaluated(reports)
    times, exact = _series(reports, name, began)
    if exact:
        label = f"{EVALUATED[name]}, held-out"
        axes.plot(times, exact, color=EVAL_COLOR, marker="o", linewidth=1.5, label=label)
        for point in list(zip(times, exact, strict=True))[-MAX_LABELS:]:
            above = {"xytext": (0, 7), "textcoords": "offset points"}
            axes.annotate(f"{point[1]:.2f}", point, ha="center", color=EVAL_COLOR, **above)
    axes.set_ylim(bottom=min(0.0, *rewards, 0.0), top=None)
    axes.margins(y=0.12)
    axes.set_ylabel(f"reward, {EVALUATED[name]}")


def _series(reports: Sequence[MetricsRow], name: str, began: float) -> tuple[list[float], list[float]]:
    """Seconds since the start, and values, of one metric."""
    rows = [row for row in reports if name in row.values]
    return [row.time - began for row in rows], [row.values[name] for row in rows]


def _draw_fleet(axes: Any, events: Sequence[FleetEvent], began: float, until: float) -> None:
    sizes = [(event.time - began, event.engines) for event in events if event.kind == FLEET]
    if sizes:
        times, counts = zip(*sizes, strict=True)
        times, counts = (*times, max(until, times[-1])), (*counts, counts[-1])
        axes.step(times, counts, where="post", color=FLEET_COLOR, linewidth=2)
        axes.fill_between(times, counts, step="post", color=FLEET_COLOR, alpha=0.2)
        axes.set_ylim(0, max(counts) + 1)
        axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("rollouts serving")
    axes.set_xlabel("seconds since the start")


def _mark_losses(above: Any, below: Any, events: Sequence[FleetEvent], began: float) -> None:
    losses = [event for event in events if event.kind == RECLAIMED]
    times = [event.time - began for event in losses]
    for axes in (above, below):
        # From the lower edge to the upper one.
        style = {"color": LOSS_COLOR, "linestyle": (0, (2, 2)), "linewidth": 1.2}
        axes.vlines(times, 0, 1, transform=axes.get_xaxis_transform(), **style)
    for event, at in list(zip(losses, times, strict=True))[-MAX_LABELS:]:
        label = event.text.removeprefix("declared fault: ").partition(" at step")[0]
        above.annotate(
            printable(label[:LABEL_CHARS]), (at, 0.02), (3, 0), xycoords=("data", "axes fraction"), rotation=90,
            textcoords="offset points", fontsize=8, color=LOSS_COLOR, va="bottom", parse_math=False,
        )  # fmt: skip


def _smoothed(values: Sequence[float]) -> list[float]:
    """Exponential moving average."""
    average = values[0] if values else 0.0
    out = []
    for value in values:
        average += SMOOTHING * (value - average)
        out.append(average)
    return out
