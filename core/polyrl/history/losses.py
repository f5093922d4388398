"""Rollouts that were taken away, and what each cost: until another one served, and the step that it fell into."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from polyrl.history.fleet import RECLAIMED, FleetEvent
from polyrl.history.rows import MetricsRow


class RolloutLoss(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """One rollout that was taken away, and what it cost."""

    worker: str
    at_seconds: float
    text: str
    replaced_after_seconds: float | None
    """Until another one served; None when none did."""
    step_seconds: float | None
    """Wall time of the RL step that it fell into."""
    median_step_seconds: float | None
    """Median over all RL steps, to compare with."""


def losses(events: Sequence[FleetEvent], reports: Sequence[MetricsRow]) -> list[RolloutLoss]:
    """Every reclaimed rollout with the time until another one served, and its step's time beside the median."""
    steps = [report for report in reports if report.phase == "rl" and "timing_s/step" in report.values]
    seconds = [step.values["timing_s/step"] for step in steps]
    ends = list(accumulate((step.time for step in steps), max))  # in order, whatever the clock did
    median = statistics.median(seconds) if steps else None
    return [
        RolloutLoss(
            worker=event.worker,
            at_seconds=event.t,
            text=event.text,
            replaced_after_seconds=replaced_s,
            step_seconds=seconds[at] if (at := bisect_left(ends, event.time)) < len(seconds) else None,
            median_step_seconds=median,
        )
        for event, replaced_s in _replaced(events)
    ]


def loss_cost(loss: RolloutLoss) -> str:
    """What it cost, in words."""
    again = loss.replaced_after_seconds
    words = "not replaced before the end" if again is None else f"replaced after {again:.1f} s"
    if loss.step_seconds is not None and loss.median_step_seconds is not None:
        words += f"; its step took {loss.step_seconds:.1f} s (median {loss.median_step_seconds:.1f} s)"
    return words


def clock_text(seconds: float) -> str:
    """mm:ss, with hours before when there are any."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"


def _replaced(events: Sequence[FleetEvent]) -> list[tuple[FleetEvent, float | None]]:
    """Losses, each with the seconds until another one served; in one pass from the end, for there may be thousands."""
    found: list[tuple[FleetEvent, float | None]] = []
    next_serving: dict[str, FleetEvent] = {}  # of two workers: the lost one's own return replaces nobody
    for event in reversed(events):
        if event.kind == "serving":
            before = [other for name, other in next_serving.items() if name != event.worker]
            next_serving = {one.worker: one for one in (event, *before[:1])}
        elif event.kind == RECLAIMED:
            later = next((one.time for name, one in next_serving.items() if name != event.worker), None)
            found.append((event, None if later is None else round(max(0.0, later - event.time), 3)))
    return found[::-1]
