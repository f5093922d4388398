"""`polyrl compare RUN RUN…`: the settings in which runs differ, and what they came to, side by side."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from polyrl.errors import UserError
from polyrl.history.foreign_text import json_line, printable
from polyrl.history.losses import clock_text
from polyrl.history.rows import LARGEST
from polyrl_cli.inspection.run_facts import RunFacts, read_facts
from polyrl_cli.inspection.runs import reward_text, steps_text
from polyrl_cli.local.run_folder import find_run
from polyrl_cli.report.terminal import terminal

ABSENT: Final = "-"
CELL_CHARS: Final = 1000
"""Characters shown of one value, some lines of a terminal; --json has all."""

Row = tuple[str, list[str]]
"""A label, and one value per run."""


def compare_runs(runs: Sequence[Path], plot: Path | None, *, as_json: bool) -> None:
    """Prints the comparison, and draws it where a file is named. Raises UserError for a run that is not there."""
    if len(runs) < 2:
        raise UserError("name two runs or more; `polyrl ls` lists them")
    if plot is not None and not plot.suffix:  # matplotlib would add one, and write another file
        raise UserError(f"--plot {plot}: name a file that ends in .png, .svg or .pdf")
    now = time.time()
    facts = [read_facts(find_run(run), now) for run in runs]
    names = run_labels(facts)
    settings, results = differing_settings(facts), result_rows(facts)
    if plot is not None:
        _draw(names, facts, plot)
    if as_json:
        tables = {"settings": dict(settings), "results": dict(results)}
        print(json_line({"runs": [str(one.root) for one in facts], **tables}))
        return
    console = terminal()
    for title, rows in (("settings that differ", settings), ("results", results)):
        if rows:
            console.print(comparison(title, names, rows))
        else:
            console.print(Text(f"{title}: none"))
        console.print()
    if plot is not None:
        console.print(Text(f"drawn in {plot}"), soft_wrap=True)


def run_labels(facts: Sequence[RunFacts]) -> list[str]:
    """The folders' names where those tell the runs apart, else their paths."""
    names = [one.root.name for one in facts]
    return names if len(set(names)) == len(names) else [str(one.root) for one in facts]


def differing_settings(facts: Sequence[RunFacts]) -> list[Row]:
    """Every field of the manifest of which not all have the same value."""
    flat = [dict(flattened(one.settings)) for one in facts]
    paths = dict.fromkeys(path for one in flat for path in one)
    rows = [(path, [one.get(path, ABSENT) for one in flat]) for path in paths]
    return [row for row in rows if len(set(row[1])) > 1]


def flattened(value: object, path: str = "") -> list[tuple[str, str]]:
    """Each leaf of a manifest with its path; a list of plain values is a leaf."""
    if isinstance(value, Mapping) and value:
        below = [(f"{path}.{key}" if path else str(key), one) for key, one in value.items()]
    elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
        below = [(f"{path}[{index}]", one) for index, one in enumerate(value)]
    else:
        return [(path, value if isinstance(value, str) else json.dumps(value))]
    return [leaf for name, one in below for leaf in flattened(one, name)]


def result_rows(facts: Sequence[RunFacts]) -> list[Row]:
    """What each came to; rows that no run has are left out."""
    rows: list[Row] = [
        ("state", [one.state.value for one in facts]),
        ("steps", [steps_text(one) for one in facts]),
        ("reward", [reward_text(one) for one in facts]),
    ]
    rows += [(name, [_course(one, name) for one in facts]) for name in _names([one.learned for one in facts], "reward")]
    measured = [{} if one.evaluation is None else one.evaluation.values for one in facts]
    rows += [(f"evaluated {name}", [_number(values.get(name)) for values in measured]) for name in _names(measured, "")]
    if any(one.attempt > 1 for one in facts):
        rows.append(("attempt, whose numbers follow", [str(one.attempt) for one in facts]))
    rows.append(("took", [clock_text(one.seconds) for one in facts]))
    for label, path in SUMMARY_ROWS.items():
        rows.append((label, [_number(_at(one.summary, path)) for one in facts]))
    return [row for row in rows if any(value not in ("", ABSENT) for value in row[1])]


SUMMARY_ROWS: Final = {
    "samples trained": ("samplesTrained",),
    "tokens generated": ("tokens", "generated"),
    "step time ÷ the longer part": ("stepTimeRatio",),
    "rollouts taken away": ("preemptions",),
    "cost": ("cost", "total"),
}
"""Numbers of summary.json that are shown, by label."""


def _names(groups: Sequence[Mapping[str, object]], left_out: str) -> list[str]:
    return sorted({name for group in groups for name in group} - {left_out})


def _course(one: RunFacts, name: str) -> str:
    course = one.learned.get(name)
    return ABSENT if course is None else f"{course.first:.3g} → {course.last:.3g}"


def _at(summary: Mapping[str, Any], path: Sequence[str]) -> Any:
    value: Any = summary
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _number(value: Any) -> str:
    if not isinstance(value, int | float) or abs(value) > LARGEST:
        return ABSENT
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def comparison(title: str, names: Sequence[str], rows: Sequence[Row]) -> Table:
    """A column for each run; long values wrap."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("", style="dim", overflow="fold")
    for name in names:
        table.add_column(Text(printable(name)), overflow="fold")
    for label, values in rows:
        table.add_row(*[Text(_shortened(printable(text))) for text in (label, *values)])
    return table


def _shortened(text: str) -> str:
    return text if len(text) <= CELL_CHARS else f"{text[:CELL_CHARS]}…"


def _draw(names: Sequence[str], facts: Sequence[RunFacts], file: Path) -> None:
    try:
        from polyrl_cli.report.plot import draw_comparison
    except ModuleNotFoundError as error:
        raise UserError(f"--plot {file}: needs matplotlib: pip install 'polyrl[plot]'") from error
    try:
        draw_comparison({name: one.rows for name, one in zip(names, facts, strict=True)}, file)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {file}: cannot be drawn there: {error}") from error
