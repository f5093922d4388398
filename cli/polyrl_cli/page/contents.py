"""What the page of a run shows, as values: read from the run's folder, which may be of a live run, a dead one, or one
that was fetched from a cluster and lacks files. All text in it is foreign; the template escapes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

import msgspec
import yaml

from polyrl.errors import UNDECODABLE
from polyrl_cli.local.run_folder import RunFolder
from polyrl_cli.report import summary
from polyrl_cli.report.progress import REWARD, clock_text
from polyrl_cli.report.timeline import RECLAIMED, FleetEvent, MetricsRow, read_metrics, read_timeline

LEARNING: Final = ("rl", "offline-rl", "sft")
"""Stages of steps, the one to show first."""
ANATOMY: Final = {
    "timing_s/train": "train",
    "timing_s/wait": "wait for rollouts",
    "timing_s/update_weights": "update weights",
    "timing_s/other": "other",
}
"""What an RL step's seconds add up of."""
UNPLOTTED: Final = {"eval/scored", "eval/unscored"}
"""Counts beside an evaluation's results."""
ENDS: Final = (RECLAIMED, "exited", "stopped")
NOT_ROLLOUTS: Final = ("manager", "trainer")


@dataclass(frozen=True)
class Series:
    """One line of a picture."""

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    few: bool = False
    """Single measurements, as evaluations are: drawn with marks, never averaged."""


@dataclass(frozen=True)
class WorkerLife:
    """When a rollout was there, in seconds since the run began; None for what has not happened."""

    worker: str
    started: float
    serving: float | None
    ended: float | None


@dataclass(frozen=True)
class Loss:
    """A rollout that was taken away."""

    worker: str
    at: float
    """Seconds since the run began."""
    clock: str
    text: str
    cost: str


@dataclass(frozen=True)
class SampleText:
    """One sample to read."""

    heading: str
    prompt: str
    response: str


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The page."""

    job: str
    outcome: str
    """succeeded, failed, interrupted, or unfinished: the run is at work or died without a summary."""
    why: str
    figures: dict[str, str]
    """What a reader asks first, in words."""
    stage: str
    learning: list[Series]
    anatomy: list[Series]
    generating: Series | None
    lengths: list[Series]
    staleness: list[Series]
    lives: list[WorkerLife]
    losses: list[Loss]
    until: float
    """Seconds from the start to the newest event or step."""
    samples: list[SampleText]
    settings: str
    """The manifest as the run used it, YAML."""
    provenance: dict[str, str]


def read_contents(folder: RunFolder) -> Contents:
    """Everything the page needs of a run. A missing file leaves its part of the page empty."""
    rows, events = read_metrics(folder.metrics), read_timeline(folder.timeline)
    job = msgspec.json.decode(folder.job.read_bytes())
    end = _read_summary(folder)
    stage = next((stage for stage in LEARNING if any(row.phase == stage for row in rows)), "rl")
    steps = [row for row in rows if row.phase == stage]
    began = min([event.time - event.t for event in events[:1]] + [row.time for row in rows[:1]], default=0.0)
    return Contents(
        job=job["metadata"]["name"],
        outcome=end.outcome if end else "unfinished",
        why=end.why if end else "",
        figures=_figures(end, rows, steps),
        stage=stage,
        learning=_learning(rows, steps),
        anatomy=_anatomy(steps),
        generating=_one(steps, "timing_s/gen", "generate"),
        lengths=_some(steps, {"response_length/mean": "mean", "response_length/max": "longest"}),
        staleness=_some(steps, {"rollout/staleness": "staleness", "rollout/dropped_groups": "groups dropped"}),
        lives=worker_lives(events, began),
        losses=_losses(events, rows, began),
        until=max([event.time for event in events] + [row.time for row in rows], default=began) - began,
        samples=[],
        settings=yaml.safe_dump(job, sort_keys=False, allow_unicode=True, width=100),
        provenance=_provenance(folder, end, job),
    )


def _read_summary(folder: RunFolder) -> summary.Summary | None:
    try:
        return msgspec.json.decode(folder.summary.read_bytes(), type=summary.Summary)
    except (OSError, *UNDECODABLE):
        return None


def _one(steps: Sequence[MetricsRow], metric: str, name: str, few: bool = False) -> Series | None:
    found = [(row.step, row.values[metric]) for row in steps if metric in row.values]
    return Series(name, *zip(*found, strict=True), few=few) if found else None


def _some(steps: Sequence[MetricsRow], metrics: dict[str, str]) -> list[Series]:
    return [series for metric, name in metrics.items() if (series := _one(steps, metric, name)) is not None]


def _anatomy(steps: Sequence[MetricsRow]) -> list[Series]:
    """Only steps that have all parts, so that they can be put on each other."""
    whole = [row for row in steps if ANATOMY.keys() <= row.values.keys()]
    return _some(whole, ANATOMY)


def _learning(rows: Sequence[MetricsRow], steps: Sequence[MetricsRow]) -> list[Series]:
    """What the stage is after, and the evaluations, each at the last step that was over before it."""
    series = _some(steps, {REWARD: "reward of training samples", "sft/loss": "SFT loss"})
    evaluations = [row for row in rows if row.phase == "eval"]
    at = {id(row): max((step.step for step in steps if step.time <= row.time), default=0) for row in evaluations}
    for name in sorted({name for row in evaluations for name in row.values} - UNPLOTTED):
        # Several evaluations may precede the first step, of the untrained model and after SFT: the newest one counts.
        points = {at[id(row)]: row.values[name] for row in evaluations if name in row.values}
        series.append(Series(f"{name.removeprefix('eval/')}, evaluation", [*points], [*points.values()], few=True))
    return series


def worker_lives(events: Sequence[FleetEvent], began: float) -> list[WorkerLife]:
    """A rollout's first start, its first serving, its end; those that are neither manager nor trainer."""
    found: dict[str, dict[str, float]] = {}
    for event in events:
        if event.worker and not event.worker.startswith(NOT_ROLLOUTS):
            found.setdefault(event.worker, {}).setdefault(event.event, event.time - began)
    return [
        WorkerLife(
            name,
            times.get("started", min(times.values())),
            serving=times.get("serving"),
            ended=min((times[end] for end in ENDS if end in times), default=None),
        )
        for name, times in found.items()
    ]


def _losses(events: Sequence[FleetEvent], rows: Sequence[MetricsRow], began: float) -> list[Loss]:
    reclaimed = [event for event in events if event.event == RECLAIMED]
    return [
        Loss(
            lost.worker,
            event.time - began,
            clock=clock_text(event.time - began),
            text=lost.text.removeprefix("declared fault: "),
            cost=summary.loss_cost(lost),
        )
        for event, lost in zip(reclaimed, summary.losses(events, rows), strict=True)
    ]


def _figures(end: summary.Summary | None, rows: Sequence[MetricsRow], steps: Sequence[MetricsRow]) -> dict[str, str]:
    figures = {}
    rewards = [row.values[REWARD] for row in steps if REWARD in row.values]
    if rewards:
        figures["reward, first → last step"] = f"{rewards[0]:.3f} → {rewards[-1]:.3f}"
    for name in sorted({name for row in rows if row.phase == "eval" for name in row.values} - UNPLOTTED):
        values = [row.values[name] for row in rows if name in row.values]
        figures[f"{name.removeprefix('eval/')}, first → last evaluation"] = f"{values[0]:.3f} → {values[-1]:.3f}"
    figures["steps"] = f"{len(steps):,}"
    if rows:
        figures["time"] = clock_text(end.wall_seconds if end else rows[-1].time - rows[0].time)
    if end is not None and end.samples.submitted:
        discarded = sum(end.samples.discarded.values())
        figures["samples trained of submitted"] = f"{end.samples.acknowledged:,} of {end.samples.submitted:,}"
        figures["samples discarded, open"] = f"{discarded:,}, {end.samples.open:,}"
        figures["tokens, generated again"] = f"{end.tokens.generated:,}, {end.tokens.regenerated:,}"
    if end is not None and end.step_time_ratio is not None:
        figures["step ÷ longer of generating and training"] = f"{end.step_time_ratio:.2f}"
    return figures


def _provenance(folder: RunFolder, end: summary.Summary | None, job: dict[str, Any]) -> dict[str, str]:
    known = {"PolyRL that made this page": version("polyrl"), "folder": folder.root.name, "kind": job["kind"]}
    if end is not None:
        known |= {"seed": str(end.seed), "starts of this run": str(end.run_epoch)}
    return known
