"""`polyrl ls`: the runs of a folder, the newest first: how they stand and what they learned."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from rich.table import Table
from rich.text import Text

from polyrl.errors import InvalidData, UserError
from polyrl.history.foreign_text import json_line, printable
from polyrl.history.losses import clock_text
from polyrl.history.results import EvaluationPoint
from polyrl.history.rows import value_text
from polyrl.history.steps import number_in, object_in
from polyrl_cli.inspection.run_facts import LocalRunState, RunFacts, read_facts
from polyrl_cli.local.run_folder import RUNS, RunFolder, runs_under
from polyrl_cli.report.terminal import terminal

STATE_STYLES: Final = {
    LocalRunState.RUNNING: "cyan",
    LocalRunState.SUCCEEDED: "green",
    LocalRunState.FAILED: "red",
    LocalRunState.INTERRUPTED: "yellow",
    LocalRunState.KILLED: "red",
}
AGES: Final = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
"""Seconds of each unit, the longest first."""
MAX_CURRENCY: Final = 8
"""Letters of one that are shown; a summary may be anybody's."""


def list_runs(given: Path | None, *, as_json: bool, note: Callable[[str], None]) -> None:
    """Prints them; `note` gets a sentence for each that is left out. Raises UserError when the folder is not there."""
    where = RUNS if given is None else given
    if given is not None and not given.is_dir():
        raise UserError(f"{given}: no such folder")
    now = time.time()
    folders = {folder: folder.fault() for folder in map(RunFolder, runs_under(where))}
    for fault in filter(None, folders.values()):
        note(f"{fault}; this run is left out")
    facts = [fact for folder, fault in folders.items() if fault is None for fact in _facts(folder, now, note)]
    if as_json:
        for one in facts:
            print(json_line(as_object(one)))
        return
    console = terminal()
    if facts:
        console.print(runs_table(facts, now, console.width))
    else:
        console.print(Text(f"no run lies in {where}; `polyrl run FILE` makes one in {RUNS}"))


def _facts(folder: RunFolder, now: float, note: Callable[[str], None]) -> list[RunFacts]:
    try:
        return [read_facts(folder, now)]
    except InvalidData as error:
        note(f"{folder.root}: {error}; this run is left out")
        return []


def runs_table(facts: list[RunFacts], now: float, width: int) -> Table:
    """One row each; columns that a terminal of this width has no room for are left out."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    # The one that folds and is never cut: a run's name is what the list is for.
    table.add_column("RUN", overflow="fold", min_width=12)
    priced = any(cost_text(one) for one in facts)
    resumed = any(one.attempt > 1 for one in facts)
    absent = {"COST": not priced, "ATTEMPT": not resumed}
    shown = [one for one in COLUMNS if width >= one.terminal and not absent.get(one.name, False)]
    for column in shown:
        table.add_column(column.name, no_wrap=True, overflow="ellipsis", justify=column.justify)
    for one in facts:
        path = Text(printable(short_path(one.root, Path.cwd())))
        table.add_row(path, *(column.cell(one, now) for column in shown))
    return table


def short_path(root: Path, here: Path) -> str:
    """As a person would type it from `here`."""
    return str(root.relative_to(here)) if root.is_relative_to(here) else str(root)


def steps_text(one: RunFacts) -> str:
    """Steps of the stage that the run is in: `rl 120/120`."""
    stages = [stage for stage in one.wanted if one.steps.get(stage)] or list(one.wanted)[:1]
    return "".join(f"{stage} {one.steps.get(stage, 0)}/{one.wanted[stage]}" for stage in stages[-1:])


def reward_text(one: RunFacts) -> str:
    """First and last of training."""
    course = one.learned.get("reward")
    return "" if course is None else f"{course.first:.3g} → {course.last:.3g}"


def evaluation_text(point: EvaluationPoint | None) -> str:
    """The number of an evaluation that says most: exact match where the reward names it."""
    if point is None:
        return ""
    name = next((name for name in ("exact_match", "reward") if name in point.values), "")
    return f"{name} {value_text(point.values[name])}" if name else ""


def cost_text(one: RunFacts) -> str:
    """At the manifest's prices, once a run has ended; empty where it names none."""
    cost = object_in(one.summary, "cost")
    currency = printable(str(cost.get("currency", "")))[:MAX_CURRENCY]
    return f"{number_in(cost, 'total', 0.0):.2f} {currency}" if cost else ""


def _state_text(one: RunFacts, now: float) -> Text:
    return Text(one.state.value, style=STATE_STYLES[one.state])


class _Column(NamedTuple):
    name: str
    terminal: int
    """Columns of a terminal that has room for it."""
    justify: Literal["left", "right"]
    cell: Callable[[RunFacts, float], str | Text]


COLUMNS: Final = (
    _Column("STATE", 0, justify="left", cell=_state_text),
    _Column("STEPS", 50, justify="left", cell=lambda one, now: steps_text(one)),
    _Column("REWARD", 96, justify="left", cell=lambda one, now: reward_text(one)),
    _Column("EVALUATION", 72, justify="left", cell=lambda one, now: Text(evaluation_text(one.evaluation))),
    _Column("COST", 84, justify="right", cell=lambda one, now: Text(cost_text(one))),
    _Column("ATTEMPT", 72, justify="right", cell=lambda one, now: str(one.attempt)),
    _Column("TOOK", 0, justify="right", cell=lambda one, now: clock_text(one.seconds)),
    _Column("AGE", 50, justify="right", cell=lambda one, now: age_text(now - one.started)),
)
"""After the name."""


def age_text(seconds: float) -> str:
    """In the largest unit of which there are two, so that nothing is off by more than a third."""
    seconds = max(0.0, seconds)
    unit, name = next(((unit, name) for unit, name in AGES if seconds >= 2 * unit), AGES[-1])
    return f"{seconds / unit:.0f} {name}"


def as_object(one: RunFacts) -> dict[str, Any]:
    """For programs; names as in summary.json."""
    return {
        "run": str(one.root),
        "job": one.name,
        "state": one.state.value,
        "steps": one.steps,
        "learned": one.learned,
        "evaluation": one.evaluation,
        "attempt": one.attempt,
        "startedAt": round(one.started, 3),
        "wallSeconds": round(one.seconds, 3),
        "cost": one.summary.get("cost"),
    }
