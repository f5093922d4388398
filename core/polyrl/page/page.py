"""The page as text."""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import jinja2
from markupsafe import Markup

from polyrl.history.foreign_text import printable
from polyrl.page import charts
from polyrl.page.contents import Contents, RunRecord, make_contents

CONTENT_SECURITY_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Nothing is loaded and no script runs, whatever a text holds; whoever serves a page sends it as a header as well."""
PAGE_HEADERS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
REFRESH_S: Final = 10
"""How often a page of an unfinished run asks to be loaded again, where something serves it anew."""
RUNNING: Final = "running"


class Picture(NamedTuple):
    """A chart with the words around it."""

    title: str
    caption: str
    svg: Markup


def render_page(run: RunRecord) -> str:
    """The HTML."""
    contents = make_contents(run)
    refresh_s = REFRESH_S if contents.state == RUNNING else None
    return _template().render(
        c=contents, pictures=_pictures(contents), refresh_s=refresh_s, policy=CONTENT_SECURITY_POLICY
    )


def without_scripts(page: str) -> str:
    """A page that another made, so that none of its scripts runs once it is a file: the first policy counts."""
    return f'<!DOCTYPE html>\n<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">\n{page}'


def _harmless(value: object) -> object:
    """Marks that turn the reading direction around would show another text than there is."""
    return type(value)(printable(value, lines=True)) if isinstance(value, str) else value


@cache
def _template() -> jinja2.Template:
    # Whatever comes from the run is escaped; only our own pictures are markup.
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("polyrl.page", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_harmless,
    )
    return templates.get_template("page.html")


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
        pictures.append(Picture("Fleet", caption, svg=Markup(charts.fleet_chart(c.lives, c.until))))
    if c.lengths:
        caption = "Tokens of a response."
        pictures.append(Picture("Lengths", caption, svg=Markup(charts.lines_chart(c.lengths, f"{c.stage} step"))))
    if c.staleness:
        caption = "Weight versions between the oldest token of a batch and the weights it trained; groups left out."
        pictures.append(Picture("Staleness", caption, svg=Markup(charts.lines_chart(c.staleness, f"{c.stage} step"))))
    return pictures
