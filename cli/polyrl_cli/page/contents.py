"""What the page of a run shows, as values: read from the run's folder, which may be of a live run, a dead one, or one
that was fetched from a cluster and lacks files. All text in it is foreign; the template escapes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Final

import msgspec
import yaml

from polyrl.history.fleet import RECLAIMED, FleetEvent, WorkerLife, worker_lives
from polyrl.history.foreign_text import printable
from polyrl.history.losses import clock_text, loss_cost, losses
from polyrl.history.results import evaluations
from polyrl.history.rows import MetricsRow
from polyrl.sample import Purpose
from polyrl.sample_record import SampleRecord
from polyrl.status import SampleCounts, TokenCounts
from polyrl_cli.inspection.kept_samples import read_samples
from polyrl_cli.inspection.run_facts import LocalRunState, RunFacts, read_facts
from polyrl_cli.inspection.samples import facts as facts_line, shortened
from polyrl_cli.local.run_folder import RunFolder
from polyrl_cli.report.timeline import read_timeline

LEARNING: Final = ("rl", "offline-rl", "sft")
"""Stages of steps, the one to show first."""
ANATOMY: Final = {
    "timing_s/train": "train",
    "timing_s/wait": "wait for rollouts",
    "timing_s/update_weights": "update weights",
    "timing_s/other": "other",
}
"""What an RL step's seconds add up of."""
MAX_SAMPLES: Final = 24
"""Of training, and of evaluation: enough to read for a while."""
MAX_TEXT_CHARS: Final = 8000
"""Of one text: with MAX_SAMPLES of them the page stays below a megabyte. `polyrl samples --full` shows all."""
MAX_NAME_CHARS: Final = 40


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
    state: LocalRunState
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
    until: float
    """Seconds from the start to the newest event or step."""
    samples: list[SampleText]
    settings: str
    """The manifest as the run used it, YAML."""
    provenance: dict[str, str]


def read_contents(folder: RunFolder, now: float) -> Contents:
    """Everything the page needs of a run. A missing file leaves its part of the page empty."""
    facts, events = read_facts(folder, now), read_timeline(folder.timeline)
    rows = facts.rows
    stage = next((stage for stage in LEARNING if any(row.phase == stage for row in rows)), "rl")
    steps = [row for row in rows if row.phase == stage]
    began = events[0].time - events[0].t if events else rows[0].time if rows else now
    return Contents(
        job=facts.name,
        state=facts.state,
        why=printable(str(facts.summary.get("cause") or facts.summary.get("why") or "")),
        figures=_figures(facts),
        stage=stage,
        learning=_learning(facts, steps),
        anatomy=_anatomy(steps),
        generating=_one(steps, "timing_s/gen", "generate"),
        lengths=_some(steps, {"response_length/mean": "mean", "response_length/max": "longest"}),
        staleness=_some(steps, {"rollout/staleness": "staleness", "rollout/dropped_groups": "groups dropped"}),
        lives=[replace(life, worker=_named(life.worker)) for life in worker_lives(events, began)],
        losses=_losses(events, rows, began),
        until=max([event.time for event in events] + [row.time for row in rows], default=began) - began,
        samples=_samples(read_samples(folder)),
        settings=yaml.safe_dump(facts.settings, sort_keys=False, allow_unicode=True, width=100),
        provenance=_provenance(facts),
    )


def _one(steps: Sequence[MetricsRow], metric: str, name: str) -> Series | None:
    found = [row for row in steps if metric in row.values]
    return Series(name, [row.step for row in found], values=[row.values[metric] for row in found]) if found else None


def _some(steps: Sequence[MetricsRow], metrics: dict[str, str]) -> list[Series]:
    return [series for metric, name in metrics.items() if (series := _one(steps, metric, name)) is not None]


def _anatomy(steps: Sequence[MetricsRow]) -> list[Series]:
    """Only steps that have all parts, so that they can be put on each other."""
    whole = [row for row in steps if ANATOMY.keys() <= row.values.keys()]
    return _some(whole, ANATOMY)


def _learning(facts: RunFacts, steps: Sequence[MetricsRow]) -> list[Series]:
    """What the stage is after; and the evaluations: those after its steps, and before them the newest one."""
    series = _some(steps, {"reward/mean": "reward of training samples", "sft/loss": "SFT loss"})
    stage = steps[0].phase if steps else ""
    points = {point.step if point.stage == stage else 0: point.values for point in evaluations(facts.rows)}
    for name in sorted({name for values in points.values() for name in values}):
        found = {step: values[name] for step, values in points.items() if name in values}
        series.append(Series(f"{_named(name)}, evaluation", [*found], values=[*found.values()], few=True))
    return series


def _samples(kept: Sequence[SampleRecord]) -> list[SampleText]:
    """The newest of training; of the newest evaluation those with the lowest reward: they say what is left to learn."""
    trained = [row for row in kept if row.purpose is Purpose.TRAIN][-MAX_SAMPLES:]
    evaluated = [row for row in kept if row.purpose is Purpose.EVAL]
    newest = [row for row in evaluated if row.moment == evaluated[-1].moment]
    worst = sorted(newest, key=lambda row: row.reward)[:MAX_SAMPLES]
    return [SampleText(_heading(row), _bounded(row.prompt), response=_bounded(row.response)) for row in trained + worst]


def _heading(row: SampleRecord) -> str:
    moment = f"evaluation after {row.stage} step" if row.purpose is Purpose.EVAL else f"{row.stage} step"
    chosen = f" ({', '.join(row.chosen)})" if row.chosen else ""
    return f"{moment} {row.step}, sample {row.sample}{chosen}: reward {row.reward:g}, {facts_line(row)}"


def _bounded(text: str) -> str:
    return shortened(printable(text, lines=True), MAX_TEXT_CHARS)


def _losses(events: Sequence[FleetEvent], rows: Sequence[MetricsRow], began: float) -> list[Loss]:
    reclaimed = [event for event in events if event.kind == RECLAIMED]
    return [
        Loss(
            _named(lost.worker),
            event.time - began,
            clock=clock_text(event.time - began),
            text=printable(lost.text.removeprefix("declared fault: ")),
            cost=loss_cost(lost),
        )
        for event, lost in zip(reclaimed, losses(events, rows), strict=True)
    ]


def _figures(facts: RunFacts) -> dict[str, str]:
    figures = {
        f"{_named(name)}, training": _course(course.first, course.last) for name, course in facts.learned.items()
    }
    points = evaluations(facts.rows)
    for name in points[-1].values if points else ():
        values = [point.values[name] for point in points if name in point.values]
        figures[f"{_named(name)}, evaluation"] = _course(values[0], values[-1])
    steps = [f"{done:,} of {facts.wanted.get(stage, done):,} {stage}" for stage, done in facts.steps.items()]
    figures |= {"steps": ", ".join(steps) or "none yet", "time": clock_text(facts.seconds)}
    return figures | _totals(facts.summary)


def _named(name: str) -> str:
    """A metric or a worker, as a legend has room for."""
    return printable(name)[:MAX_NAME_CHARS]


def _course(first: float, last: float) -> str:
    return f"{first:.3f} → {last:.3f}"


def _totals(end: Mapping[str, Any]) -> dict[str, str]:
    """Of a whole run's summary; empty for one that has none, or none that can be read."""
    try:
        samples = msgspec.convert(end["samples"], SampleCounts)
        tokens = msgspec.convert(end["tokens"], TokenCounts)
        ratio = msgspec.convert(end["stepTimeRatio"], float | None)
    except (KeyError, msgspec.ValidationError):
        return {}
    figures = {}
    if samples.submitted:
        figures["samples"] = f"{samples.submitted:,}, {sum(samples.discarded.values()):,} discarded"
        figures["tokens"] = f"{tokens.generated:,}, {tokens.regenerated:,} twice"
    if ratio is not None:
        figures["step ÷ the longer of its parts"] = f"{ratio:.2f}"
    return figures


def _provenance(facts: RunFacts) -> dict[str, str]:
    known = {"page made by": f"PolyRL {version('polyrl')}", "folder": facts.root.name}
    named = {"seed": "seed", "epoch": "starts of this run"}
    return known | {words: printable(str(facts.summary[key])) for key, words in named.items() if key in facts.summary}
