"""`polyrl samples [RUN]`: what the model wrote, to read: prompt, response, reward and what goes with it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from polyrl.errors import UserError
from polyrl.history.foreign_text import json_line, printable
from polyrl.history.sample_words import facts, shortened
from polyrl.sample import Purpose
from polyrl.sample_record import SampleRecord
from polyrl_cli.inspection.kept_samples import SampleQuery, find, ordered, read_samples
from polyrl_cli.local.run_folder import find_run
from polyrl_cli.report.terminal import terminal

SHOWN_CHARS: Final = 1200
"""Characters shown of one text, about fifteen lines of a terminal, so that several samples fit a screen or two."""
LINE_CHARS: Final = 60
"""A text so short stands beside its name."""
INDENT: Final = (0, 0, 0, 2)
DEEPER: Final = (0, 0, 0, 4)


def show_samples(run: Path | None, query: SampleQuery, *, full: bool, as_json: bool) -> None:
    """Prints them. Raises UserError when there are none."""
    folder = find_run(run)
    try:
        found = find(read_samples(folder), query)
    except UserError as error:
        raise UserError(f"{folder.root}: {error}") from None
    shown = ordered(found, query, random.Random())
    if as_json:
        for row in shown:
            print(json_line(row))
        return
    console = terminal()
    console.print(Text(heading(found, shown, query), style="bold"))
    for row in shown:
        console.print()
        for part in sample_view(row, None if full else SHOWN_CHARS):
            console.print(part)


def heading(found: Sequence[SampleRecord], shown: Sequence[SampleRecord], query: SampleQuery) -> str:
    """What is shown, of how many."""
    first = found[0]
    moment = f"{first.stage.upper()} step {first.step}"
    if first.purpose is Purpose.EVAL:
        moment = f"evaluation after {moment}" if first.step else "evaluation before training"
    if query.group is not None:
        moment = f"group {query.group}, {moment}"
    return f"{moment}: {len(shown)} of {len(found)} samples kept, {query.order}"


def sample_view(row: SampleRecord, max_chars: int | None) -> Iterator[RenderableType]:
    """One sample, with texts of at most so many characters."""
    chosen = f"  {', '.join(row.chosen)}" if row.chosen else ""
    yield Text.assemble((row.sample, "bold cyan"), "  reward ", (f"{row.reward:g}", "bold"), (chosen, "dim"))
    yield Padding(Text(facts(row), style="dim"), INDENT, expand=False)
    for name, text in (("prompt", row.prompt), ("response", row.response)):
        shown = shortened(printable(text, lines=True), max_chars) or "(empty)"
        if len(shown) <= LINE_CHARS and "\n" not in shown:
            yield Padding(Text.assemble((f"{name:<8}  ", "dim"), shown), INDENT, expand=False)
        else:
            yield Padding(Text(name, style="dim"), INDENT, expand=False)
            yield Padding(Text(shown), DEEPER, expand=False)
