"""Rollouts that were taken away, and what each cost: until another one served, and the step that it fell into."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

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
    median = statistics.median([step.values["timing_s/step"] for step in steps]) if steps else None
    return [
        RolloutLoss(
            worker=event.worker,
            at_seconds=event.t,
            text=event.text,
            replaced_after_seconds=_seconds_to_next_serving(event, events),
            step_seconds=next((step.values["timing_s/step"] for step in steps if step.time >= event.time), None),
            median_step_seconds=median,
        )
        for event in events
        if event.kind == RECLAIMED
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


def _seconds_to_next_serving(lost: FleetEvent, events: Sequence[FleetEvent]) -> float | None:
    later = (event for event in events if event.kind == "serving" and event.time >= lost.time)
    return next((round(event.time - lost.time, 3) for event in later if event.worker != lost.worker), None)
