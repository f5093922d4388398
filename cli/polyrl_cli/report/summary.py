"""What a run came to: the numbers of `summary.json`, computed once from what trainer, manager and fleet wrote; and the
panel that a run prints last: what was learned, where the time went, what the losses cost, where the files are."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from polyrl.errors import UNDECODABLE
from polyrl.status import ManagerStatus, SampleCounts, TokenCounts
from polyrl_cli.report.progress import WIDTH, clock_text
from polyrl_cli.report.timeline import RECLAIMED, FleetEvent, MetricsRow

STEP_PARTS: Final = {
    "generate": "timing_s/gen",
    "train": "timing_s/train",
    "wait": "timing_s/wait",
    "updateWeights": "timing_s/update_weights",
    "rewardTail": "timing_s/reward_tail",
    "other": "timing_s/other",
    "overlap": "timing_s/overlap",
}
"""Parts of an RL step in the summary and in metrics.jsonl, which the metrics' reference explains."""

MOMENTS: Final = {"base": "before", "afterSft": "after SFT", "afterRl": "after RL"}
OUTCOME_STYLES: Final = {"succeeded": "green", "interrupted": "yellow", "failed": "red"}
STAGES: Final = {"start": "start", "sft": "SFT", "rl": "RL", "offline-rl": "offline RL", "rest": "evaluation and rest"}
FILES: Final = ("summary.json", "run.png", "metrics.jsonl", "fleet.jsonl", "checkpoints", "tensorboard", "logs")
BAR_WIDTH: Final = 30
"""Columns of an exact match of 1."""


class TrainerResult(msgspec.Struct, frozen=True, rename="camel"):
    """The part of trainer-result.json that is shown; the summary's fields of the same names explain it."""

    exact_match: dict[str, float] = {}
    steps: dict[str, int] = {}
    generate_seconds: float = 0.0
    train_seconds: float = 0.0
    step_time_ratio: float | None = msgspec.field(default=None, name="stepRatio")
    user_code_failures: dict[str, int] = {}
    first_failures: dict[str, str] = {}


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


class Summary(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """summary.json."""

    job: str
    outcome: str
    """succeeded, failed or interrupted."""
    why: str
    seed: int
    run_epoch: int = msgspec.field(name="epoch")
    exact_match: dict[str, float]
    """base, afterSft, afterRl: those that were measured."""
    steps: dict[str, int]
    """Whole steps, by stage."""
    wall_seconds: float
    """From the first process to the last, this start of the run only."""
    seconds: dict[str, float]
    """Where they went: start, sft, rl, rest."""
    samples: SampleCounts
    tokens: TokenCounts
    bytes_per_token: float | None
    """Agent to manager, per generated token."""
    preemptions: int
    losses: list[RolloutLoss]
    generate_seconds: float
    train_seconds: float
    step_time_ratio: float | None
    """RL step time ÷ max(generate, train), over the whole run; 1 is perfect overlap."""
    user_code_failures: dict[str, int]
    """Calls of the user's functions that gave no verdict, by reason."""
    first_failures: dict[str, str]
    """The first message of each of those reasons."""
    step_parts: dict[str, float]
    """Seconds of RL steps by part; `overlap` is what would be missing if the others were added up."""


def read_trainer_result(file: Path) -> TrainerResult:
    """What the trainer left behind; empty when it left nothing or something broken (it may have been killed)."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=TrainerResult)
    except (OSError, *UNDECODABLE):
        return TrainerResult()


def step_parts(reports: Sequence[MetricsRow]) -> dict[str, float]:
    """Seconds of all RL steps together, by part."""
    steps = [report.values for report in reports if report.phase == "rl"]
    return {part: round(sum(values.get(name, 0.0) for values in steps), 3) for part, name in STEP_PARTS.items()}


def seconds_by_stage(reports: Sequence[MetricsRow], began: float, wall_seconds: float) -> dict[str, float]:
    """Wall seconds: `start` until the first report, steps by stage, and the rest (evaluation, checkpoints, the end)."""
    if not reports:
        return {"start": round(wall_seconds, 3)}
    took = {"start": max(0.0, reports[0].time - began - reports[0].values.get("timing_s/step", 0.0))}
    for stage in ("sft", "rl", "offline-rl"):
        took[stage] = sum(report.values.get("timing_s/step", 0.0) for report in reports if report.phase == stage)
    took["rest"] = max(0.0, wall_seconds - sum(took.values()))
    return {stage: round(seconds, 3) for stage, seconds in took.items() if seconds > 0}


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


def bytes_per_token(status: ManagerStatus) -> float | None:
    """Wire bytes of deltas per generated token; None when nothing was generated."""
    generated = status.tokens.generated
    return round(status.delta_bytes / generated, 2) if generated else None


def _seconds_to_next_serving(lost: FleetEvent, events: Sequence[FleetEvent]) -> float | None:
    later = (event for event in events if event.kind == "serving" and event.time >= lost.time)
    return next((round(event.time - lost.time, 3) for event in later if event.worker != lost.worker), None)


def print_summary(summary: Summary, folder: Path, console: Console) -> None:
    """Prints the panel, then the folder's path on a line of its own so that it can be copied whole."""
    style = OUTCOME_STYLES[summary.outcome]
    title = f"[bold]{summary.job}[/]  [{style}]{summary.outcome}[/]  [dim]in {clock_text(summary.wall_seconds)}[/]"
    body = Group(*_body(summary, folder))
    console.print(Panel(body, title=title, title_align="left", width=WIDTH, border_style=style, padding=(1, 2)))
    console.print(f"All of it lies in {folder}", highlight=False, soft_wrap=True)


def _body(summary: Summary, folder: Path) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if summary.outcome != "succeeded":
        parts += [Text(summary.why, style=OUTCOME_STYLES[summary.outcome]), Text()]
    if summary.exact_match:
        parts += [_exact_match(summary.exact_match), Text()]
    parts += [_facts(summary), Text()]
    if summary.losses:
        parts += [_losses(summary), Text()]
    kept = [name for name in FILES if (folder / name).exists()]
    parts.append(Text.assemble(("files  ", "dim"), "  ".join(kept)))
    return parts


def _exact_match(measured: Mapping[str, float]) -> Table:
    table = Table.grid(padding=(0, 2))
    for moment, words in MOMENTS.items():
        if moment in measured:
            bar = Text("█" * round(measured[moment] * BAR_WIDTH), style="green" if moment == "afterRl" else "cyan")
            bar.append("░" * (BAR_WIDTH - len(bar)), style="bright_black")
            table.add_row(Text(f"exact match {words}", style="dim"), bar, Text(f"{measured[moment]:.3f}", style="bold"))
    return table


def _facts(summary: Summary) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    if summary.steps:
        table.add_row(
            "steps", ", ".join(f"{count} {STAGES.get(stage, stage)}" for stage, count in summary.steps.items())
        )
    table.add_row("time", ", ".join(f"{STAGES[stage]} {seconds:.0f} s" for stage, seconds in summary.seconds.items()))
    if summary.step_time_ratio is not None:
        table.add_row("RL step", _step_words(summary))
    if summary.samples.submitted:
        table.add_row("samples", _sample_words(summary))
        table.add_row("tokens", _token_words(summary))
    for reason, message in summary.first_failures.items():
        table.add_row(reason, f"{summary.user_code_failures.get(reason, 0):,} times, first: {message}")
    table.add_row("seed", str(summary.seed))
    return table


def _step_words(summary: Summary) -> str:
    parts = summary.step_parts
    named = (("generate", "generate"), ("train", "train"), ("weights", "updateWeights"), ("tail", "rewardTail"))
    seconds = ", ".join(f"{words} {parts.get(part, 0):.0f} s" for words, part in named)
    ratio = f"{summary.step_time_ratio:.2f} × the longer of generating and training"
    return f"{ratio}\n({seconds}, other {parts.get('other', 0):.0f} s)"


def _sample_words(summary: Summary) -> str:
    samples = summary.samples
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(samples.discarded.items()))
    return (
        f"{samples.submitted:,} submitted = {samples.acknowledged:,} acknowledged"
        f" + {sum(samples.discarded.values()):,} discarded"
        + (f" ({reasons})" if reasons else "")
        + (f" + {samples.open:,} open" if samples.open else "")
    )


def _token_words(summary: Summary) -> str:
    tokens = summary.tokens
    wire = f", {summary.bytes_per_token:g} bytes each to send" if summary.bytes_per_token else ""
    return f"{tokens.generated:,} generated, {tokens.regenerated:,} of them again{wire}"


def _losses(summary: Summary) -> Table:
    table = Table.grid(padding=(0, 2))
    replaced = sum(loss.replaced_after_seconds is not None for loss in summary.losses)
    table.add_row(Text(f"{summary.preemptions} rollouts taken away, {replaced} replaced", style="bold"))
    for loss in summary.losses:
        table.add_row(
            f"{clock_text(loss.at_seconds)}  {loss.text.removeprefix('declared fault: ')}\n       {_loss_cost(loss)}"
        )
    return table


def _loss_cost(loss: RolloutLoss) -> str:
    again = loss.replaced_after_seconds
    words = "not replaced before the end" if again is None else f"replaced after {again:.1f} s"
    if loss.step_seconds is not None and loss.median_step_seconds is not None:
        words += f"; its step took {loss.step_seconds:.1f} s (median {loss.median_step_seconds:.1f} s)"
    return words
