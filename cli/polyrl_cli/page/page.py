"""`polyrl report RUN`: the page of a run, one HTML file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import jinja2
from markupsafe import Markup

from polyrl.errors import UserError
from polyrl_cli.inspection.run_facts import LocalRunState
from polyrl_cli.local.run_folder import RunFolder, find_run
from polyrl_cli.page import charts
from polyrl_cli.page.contents import Contents, read_contents

REFRESH_S: Final = 10
"""How often a page of an unfinished run asks to be loaded again, where something serves it anew."""


@dataclass(frozen=True)
class Picture:
    """A chart with the words around it."""

    title: str
    caption: str
    svg: Markup


def write_report(run: Path | None, out: Path | None) -> Path:
    """Writes the page of `run` to `out`, by default report.html in the run's folder, and returns where it lies.
    Raises UserError when there is no such run, or the file cannot be written."""
    folder = find_run(run)
    file = out if out is not None else folder.root / "report.html"
    text = render_page(folder)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Whoever reads it meanwhile sees the old page or the new one.
        partial = file.with_name(f".{file.name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise UserError(f"{file}: cannot be written ({error.strerror})") from error
    return file


def render_page(folder: RunFolder) -> str:
    """The HTML."""
    contents = read_contents(folder, time.time())
    # Whatever comes from the run is escaped; only our own pictures are markup.
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("polyrl_cli.page", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return templates.get_template("page.html").render(
        c=contents,
        pictures=_pictures(contents),
        refresh_s=REFRESH_S if contents.state is LocalRunState.RUNNING else None,
    )


def _pictures(c: Contents) -> list[Picture]:
    pictures = []
    if c.learning:
        caption = "Single steps pale, their moving average strong; evaluations are marked points."
        pictures.append(Picture("Learning", caption, svg=Markup(charts.lines_chart(c.learning, f"{c.stage} step"))))
    if c.anatomy:
        caption = "Seconds of each step. Training runs while samples still come in: where the dashed line is above the"
        caption += " learner's part, generating overlaps with it."
        stacked = charts.stacked_chart(c.anatomy, c.generating, f"{c.stage} step")
        pictures.append(Picture("Where a step's time goes", caption, svg=Markup(stacked)))
    if c.lives:
        caption = "Pale: starting. Blue: serving. A red cross: taken away."
        pictures.append(Picture("Fleet", caption, svg=Markup(charts.fleet_chart(c.lives, c.losses, c.until))))
    if c.lengths:
        caption = "Tokens of a response."
        pictures.append(Picture("Lengths", caption, svg=Markup(charts.lines_chart(c.lengths, f"{c.stage} step"))))
    if c.staleness:
        caption = "Weight versions between the oldest token of a batch and the weights it trained; groups left out."
        pictures.append(Picture("Staleness", caption, svg=Markup(charts.lines_chart(c.staleness, f"{c.stage} step"))))
    return pictures
