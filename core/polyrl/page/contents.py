"""What the page of a run shows, as values, from what is known of the run: by its folder, or by its manager. All text in
it is foreign; the template escapes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, Final

from polyrl.history.cost import cost_words, prices_in
from polyrl.history.fleet import RECLAIMED, FleetEvent, WorkerLife, worker_lives
from polyrl.history.foreign_text import printable
from polyrl.history.losses import clock_text, loss_cost, losses
from polyrl.history.results import courses, evaluations
from polyrl.history.rows import MetricsRow, value_text
from polyrl.history.sample_words import facts, shortened
from polyrl.history.steps import steps_done, wanted_steps
from polyrl.sample import Pool, Purpose
from polyrl.sample_record import SampleRecord
from polyrl.status import SampleCounts, TokenCounts

LEARNING: Final = ("rl", "offline-rl", "dpo", "reward-model", "sft")
"""Stages of steps, the one to show first."""
ANATOMY: Final = {
    "timing_s/train": "train",
    "timing_s/wait": "wait for rollouts",
    "timing_s/update_weights": "update weights",
    "timing_s/other": "other",
}
"""What an RL step's seconds add up of."""
SHOWN_SAMPLES: Final = 24
"""Samples shown of training, and as many of evaluation: enough to read for a while."""
SHOWN_LOSSES: Final = 100
"""The newest ones: a page that people can read, of a run that loses thousands."""
MAX_TEXT_CHARS: Final = 8000
"""Most characters of a text: SHOWN_SAMPLES texts keep the page below a megabyte. `polyrl samples --full` shows all."""
MAX_NAME_CHARS: Final = 40


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What is known of a run."""

    job: str
    state: str
    """running, succeeded, failed, ..."""
    why: str = ""
    job_settings: Mapping[str, Any]
    """The manifest as the run used it; one from elsewhere may hold anything."""
    settings: str
    """The same, to be read."""
    rows: Sequence[MetricsRow]
    events: Sequence[FleetEvent]
    samples: Sequence[SampleRecord]
    seconds: float
    held: Mapping[Pool, float]
    """Seconds that machines were."""
    machines: Mapping[Pool, int]
    """Held now."""
    counts: SampleCounts | None = None
    tokens: TokenCounts | None = None
    step_time_ratio: float | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Series:
    """One line of a picture."""

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    few: bool = False
    """Single measurements, as evaluations are: drawn with marks, never averaged."""


@dataclass(frozen=True)
class Loss:
    """A rollout that was taken away."""

    clock: str
    """Since the run began."""
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
    state: str
    why: str
    """Cause of a bad end."""
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
    """The newest ones."""
    more_losses: int
    """Before those."""
    until: float
    """Seconds from the start to the newest event or step."""
    samples: list[SampleText]
    settings: str
    provenance: dict[str, str]


def make_contents(run: RunRecord) -> Contents:
    """Everything the page shows. What is not known leaves its part of the page empty."""
    rows, events = run.rows, run.events
    stage = next((stage for stage in LEARNING if any(row.phase == stage for row in rows)), "rl")
    steps = [row for row in rows if row.phase == stage]
    began = events[0].time - events[0].t if events else rows[0].time if rows else 0.0
    lost = _losses(events, rows, began)
    return Contents(
        job=run.job,
        state=run.state,
        why=printable(run.why),
        figures=_figures(run),
        stage=stage,
        learning=_learning(rows, steps),
        anatomy=_anatomy(steps),
        generating=_one(steps, "timing_s/gen", "generate"),
        lengths=_some(steps, {"response_length/mean": "mean", "response_length/max": "longest"}),
        staleness=_some(steps, {"rollout/staleness": "staleness", "rollout/dropped_groups": "groups dropped"}),
        lives=[replace(life, worker=printable(life.worker)) for life in worker_lives(events, began)],
        losses=lost,
        more_losses=sum(event.kind == RECLAIMED for event in events) - len(lost),
        until=max([event.time for event in events] + [row.time for row in rows], default=began) - began,
        samples=_samples(run.samples),
        settings=run.settings,
        provenance={"page made by": f"PolyRL {version('polyrl')}", **run.provenance},
    )


def _one(steps: Sequence[MetricsRow], metric: str, name: str) -> Series | None:
    found = [row for row in steps if metric in row.values]
    return Series(name, [row.step for row in found], values=[row.values[metric] for row in found]) if found else None


def _some(steps: Sequence[MetricsRow], metrics: dict[str, str]) -> list[Series]:
    return [series for metric, name in metrics.items() if (series := _one(steps, metric, name)) is not None]


def _anatomy(steps: Sequence[MetricsRow]) -> list[Series]:
    """Only steps that have all parts, so that they can be put on each other."""
    return _some([row for row in steps if ANATOMY.keys() <= row.values.keys()], ANATOMY)


def _learning(rows: Sequence[MetricsRow], steps: Sequence[MetricsRow]) -> list[Series]:
    """What the stage is after; and the evaluations: those after its steps, and before them the newest one."""
    series = _some(steps, {"reward/mean": "reward of training samples", "sft/loss": "SFT loss"})
    stage = steps[0].phase if steps else ""
    points = {point.step if point.stage == stage else 0: point.values for point in evaluations(rows)}
    found: dict[str, dict[float, float]] = {}
    for step, values in points.items():  # in one pass, for each may have other names
        for name, value in values.items():
            found.setdefault(name, {})[step] = value
    for name in sorted(found):
        series.append(Series(f"{_named(name)}, evaluation", [*found[name]], values=[*found[name].values()], few=True))
    return series


def _samples(kept: Sequence[SampleRecord]) -> list[SampleText]:
    """The newest of training; of the newest evaluation those with the lowest reward: they say what is left to learn."""
    trained = [row for row in kept if row.purpose is Purpose.TRAIN][-SHOWN_SAMPLES:]
    evaluated = [row for row in kept if row.purpose is Purpose.EVAL]
    newest = [row for row in evaluated if row.moment == evaluated[-1].moment]
    worst = sorted(newest, key=lambda row: row.reward)[:SHOWN_SAMPLES]
    return [SampleText(_heading(row), _bounded(row.prompt), response=_bounded(row.response)) for row in trained + worst]


def _heading(row: SampleRecord) -> str:
    moment = f"evaluation after {row.stage} step" if row.purpose is Purpose.EVAL else f"{row.stage} step"
    chosen = f" ({', '.join(row.chosen)})" if row.chosen else ""
    return f"{moment} {row.step}, sample {row.sample}{chosen}: reward {row.reward:g}, {facts(row)}"


def _bounded(text: str) -> str:
    return shortened(printable(text, lines=True), MAX_TEXT_CHARS)


def _losses(events: Sequence[FleetEvent], rows: Sequence[MetricsRow], began: float) -> list[Loss]:
    reclaimed = [event for event in events if event.kind == RECLAIMED]
    newest = list(zip(reclaimed, losses(events, rows), strict=True))[-SHOWN_LOSSES:]
    return [
        Loss(
            clock_text(event.time - began),
            text=printable(lost.text.removeprefix("declared fault: ")),
            cost=loss_cost(lost),
        )
        for event, lost in newest
    ]


def _figures(run: RunRecord) -> dict[str, str]:
    figures = {
        f"{_named(name)}, training": _course(course.first, course.last) for name, course in courses(run.rows).items()
    }
    points = evaluations(run.rows)
    first: dict[str, float] = {}
    for point in points:
        for name, value in point.values.items():
            first.setdefault(name, value)
    for name, last in points[-1].values.items() if points else ():
        figures[f"{_named(name)}, evaluation"] = _course(first[name], last)
    wanted = wanted_steps(run.job_settings)
    steps = [f"{done:,} of {wanted.get(stage, done):,} {stage}" for stage, done in steps_done(run.rows).items()]
    figures |= {"steps": ", ".join(steps) or "none yet", "time": clock_text(run.seconds)}
    if cost := cost_words(prices_in(run.job_settings), run.held, run.machines):
        figures["cost"] = printable(cost)
    return figures | _totals(run)


def _named(name: str) -> str:
    """A metric or a worker, as a legend has room for."""
    return printable(name)[:MAX_NAME_CHARS]


def _course(first: float, last: float) -> str:
    return f"{value_text(first)} → {value_text(last)}"


def _totals(run: RunRecord) -> dict[str, str]:
    figures = {}
    if run.counts is not None and run.counts.submitted:
        figures["samples"] = f"{run.counts.submitted:,}, {sum(run.counts.discarded.values()):,} discarded"
    if run.tokens is not None and run.tokens.generated:
        figures["tokens"] = f"{run.tokens.generated:,}, {run.tokens.regenerated:,} twice"
    if run.step_time_ratio is not None:
        figures["step ÷ the longer of its parts"] = f"{run.step_time_ratio:.2f}"
    return figures
