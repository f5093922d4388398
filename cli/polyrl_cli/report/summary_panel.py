"""The last thing a run prints: what was learned, where the time went, what the losses cost, where the files are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from polyrl_cli.report.progress import WIDTH, clock_text
from polyrl_cli.report.summary import RolloutLoss, Summary

MOMENTS: Final = {"base": "before", "afterSft": "after SFT", "afterRl": "after RL"}
OUTCOME_STYLES: Final = {"succeeded": "green", "interrupted": "yellow", "failed": "red"}
STAGES: Final = {"start": "start", "sft": "SFT", "rl": "RL", "offline-rl": "offline RL", "rest": "evaluation and rest"}
FILES: Final = ("summary.json", "run.png", "metrics.jsonl", "fleet.jsonl", "checkpoints", "tensorboard", "logs")
BAR_WIDTH: Final = 30
"""Columns of an exact match of 1."""


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
