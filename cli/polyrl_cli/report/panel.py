"""The panel that a run prints last: what was learned, where the time went, what the losses cost, where the files are.

It fits the terminal, however narrow. A run that failed begins with the cause, in the words of the worker at fault.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from polyrl.history.foreign_text import printable
from polyrl.history.losses import clock_text, loss_cost
from polyrl.history.results import EVALUATION_PREFIX, Course, EvaluationPoint, milestones
from polyrl.history.rows import value_text
from polyrl_cli.report.progress import BESIDE_BAR, EXACT_MATCH, SPARK_WIDTH, WIDTH, sparkline
from polyrl_cli.report.summary import Summary

OUTCOME_STYLES: Final = {"succeeded": "green", "interrupted": "yellow", "failed": "red"}
STAGES: Final = {
    **{"start": "start", "sft": "SFT", "rl": "RL", "offline-rl": "offline RL", "dpo": "DPO"},
    **{"reward-model": "reward model", "rest": "evaluation and rest"},
}
FILES: Final = (
    *("summary.json", "run.png", "samples.jsonl", "metrics.jsonl", "fleet.jsonl", "checkpoints", "tensorboard"),
    *("logs", "logs/prints.log"),
)
LONGEST_BAR: Final = 30
"""Columns of a share of 1, where the terminal has them."""
SHORTEST_BAR: Final = 4
SHOWN_METRICS: Final = 5
"""Numbers shown of those that a reward function names; summary.json has all."""
SHOWN_CAUSE_LINES: Final = 12
SHARE: Final = EXACT_MATCH.removeprefix(EVALUATION_PREFIX)


def print_summary(summary: Summary, folder: Path, console: Console, rewards: Sequence[float] = ()) -> None:
    """Prints the panel, then the folder's path on a line of its own so that it can be copied whole. `rewards` are those
    of all steps."""
    width = min(WIDTH, console.width)
    style = OUTCOME_STYLES[summary.outcome]
    took = f"in {clock_text(summary.wall_seconds)}"
    title = Text.assemble((summary.job, "bold"), "  ", (summary.outcome, style), "  ", (took, "dim"))
    body = Group(*_body(summary, folder, width, rewards))
    console.print(Panel(body, title=title, title_align="left", width=width, border_style=style, padding=(1, 2)))
    console.print(f"All of it lies in {folder}", soft_wrap=True)


def _body(summary: Summary, folder: Path, width: int, rewards: Sequence[float]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if summary.outcome != "succeeded":
        parts += [*_end(summary), Text()]
    if summary.learned:
        parts += [_courses(summary.learned, rewards), Text()]
    if summary.evaluations:
        parts += [_evaluations(summary, width), Text()]
    parts += [_facts(summary), Text()]
    if summary.losses:
        parts += [_losses(summary), Text()]
    return [*parts, _files(folder)]


def _end(summary: Summary) -> list[RenderableType]:
    """The cause in the words of who was at fault, then what the runner saw of it: an exit code, mostly."""
    lines = printable(summary.cause, lines=True).splitlines()
    cause = [Text(line, style=f"bold {OUTCOME_STYLES[summary.outcome]}") for line in lines[:SHOWN_CAUSE_LINES]]
    if len(lines) > SHOWN_CAUSE_LINES:
        cause.append(Text(f"… {len(lines) - SHOWN_CAUSE_LINES} lines more"))
    return [*cause, Text(summary.why, style="" if cause else OUTCOME_STYLES[summary.outcome])]


def _courses(learned: Mapping[str, Course], rewards: Sequence[float]) -> Table:
    """The reward, and what is named beside it; a number that only repeats the reward is left out."""
    table = _table()
    own = {name: course for name, course in learned.items() if name == "reward" or course != learned.get("reward")}
    for name, course in list(own.items())[: SHOWN_METRICS + 1]:
        curve = sparkline(_buckets(rewards, SPARK_WIDTH)) if name == "reward" else ""
        shown = Text.assemble((f"{course.first:.3g} → {course.last:.3g}", "bold"), (f"  {curve}", "cyan"))
        table.add_row(Text(printable(name)), shown)
    return table


def _buckets(values: Sequence[float], count: int) -> list[float]:
    """At most so many means of neighbours."""
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    return [statistics.fmean(values[low:high]) for low, high in itertools.pairwise(edges) if high > low]


def _evaluations(summary: Summary, width: int) -> Table:
    """One line each: before, after SFT, after RL; a bar where all of them are a share of exact matches."""
    points = milestones(summary.evaluations)
    table = _table()
    if all(SHARE in point.values for point in points):
        longest = min(LONGEST_BAR, width - BESIDE_BAR)
        for point in points:
            share = point.values[SHARE]
            bar = _bar(share, longest, last=point is points[-1]) if longest >= SHORTEST_BAR else Text()
            bar.append(f"  {value_text(share)}", style="bold").append(_pass_rate(point))
            table.add_row(Text(f"exact match {_moment(point, summary)}"), bar)
        return table
    for point in points:
        numbers = {"reward": 0.0, **point.values}
        words = ", ".join(
            f"{printable(name)} {value:.3g}" for name, value in list(numbers.items())[: SHOWN_METRICS + 1]
        )
        table.add_row(Text(f"evaluated {_moment(point, summary)}"), Text(words, style="bold"))
    return table


def _pass_rate(point: EvaluationPoint) -> str:
    """The pass rate of the most answers that a prompt got, as text; empty where it got one."""
    rates = [name for name in point.values if name.startswith("pass@")]
    return f"  {rates[-1]} {value_text(point.values[rates[-1]])}" if rates else ""


def _bar(share: float, longest: int, *, last: bool) -> Text:
    bar = Text("█" * round(min(max(share, 0.0), 1.0) * longest), style="green" if last else "cyan")
    return bar.append("░" * (longest - len(bar)), style="bright_black")


def _moment(point: EvaluationPoint, summary: Summary) -> str:
    if not point.stage:
        return "before"
    stage = STAGES.get(point.stage, point.stage)
    over = summary.outcome == "succeeded" or point.stage != summary.evaluations[-1].stage
    return f"after {stage}" if over else f"at {stage} step {point.step}"


def _table() -> Table:
    """Labels beside values; where it is narrow the values wrap."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _facts(summary: Summary) -> Table:
    table = _table()
    if summary.steps:
        table.add_row(
            "steps", ", ".join(f"{count} {STAGES.get(stage, stage)}" for stage, count in summary.steps.items())
        )
    if summary.run_epoch > 1:
        before = f"summary-of-epoch-{summary.run_epoch - 1}.json"
        table.add_row(
            "attempt", f"number {summary.run_epoch}, whose time, samples and losses follow; {before} has those before"
        )
    table.add_row("time", ", ".join(f"{STAGES[stage]} {seconds:.0f} s" for stage, seconds in summary.seconds.items()))
    if summary.step_time_ratio is not None:
        table.add_row("RL step", _step_words(summary))
    if summary.samples.submitted:
        table.add_row("samples", _sample_words(summary))
        table.add_row("tokens", _token_words(summary))
    if summary.cost is not None:
        table.add_row("cost", summary.cost.words())
    for reason, message in summary.first_failures.items():
        words = f"{summary.user_code_failures.get(reason, 0):,} times, first: {printable(message)}"
        table.add_row(reason, Text(words, overflow="fold"))
    if summary.gpus:
        table.add_row("GPUs", ", ".join(f"{name} {','.join(gpus)}" for name, gpus in summary.gpus.items()))
    for name, sink in summary.sinks.items():
        if sink.lost:
            table.add_row(name, Text(f"{sink.lost:,} rows did not get there: {printable(sink.error)}", overflow="fold"))
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
    trained, evaluated = summary.samples_trained, summary.samples_evaluated
    undone = samples.acknowledged - trained - evaluated
    return (
        f"{samples.submitted:,} submitted = {trained:,} trained + {evaluated:,} evaluated"
        + (f" + {undone:,} of steps that did not become whole" if undone > 0 else "")
        + f" + {sum(samples.discarded.values()):,} discarded"
        + (f" ({reasons})" if reasons else "")
        + (f" + {samples.open:,} open" if samples.open else "")
    )


def _token_words(summary: Summary) -> str:
    tokens = summary.tokens
    wire = f", {summary.bytes_per_token:g} bytes each to send" if summary.bytes_per_token else ""
    return f"{tokens.generated:,} generated, {tokens.regenerated:,} of them again{wire}"


def _losses(summary: Summary) -> RenderableType:
    replaced = sum(loss.replaced_after_seconds is not None for loss in summary.losses)
    lines = [Text(f"{summary.preemptions} rollouts taken away, {replaced} replaced", style="bold")]
    for loss in summary.losses:
        fault = loss.text.removeprefix("declared fault: ")
        lines.append(Text(f"{clock_text(loss.at_seconds)}  {fault}\n       {loss_cost(loss)}"))
    return Group(*lines)


def _files(folder: Path) -> Text:
    """Names of the run's files that exist and hold anything."""
    paths = {name: folder / name for name in FILES}
    kept = [name for name, path in paths.items() if path.is_dir() or (path.exists() and path.stat().st_size)]
    return Text.assemble(("files  ", "dim"), "  ".join(kept))
