"""Draws the docs' pictures of a finished run: its closing summary, `polyrl top`, and the page of `polyrl report`.

make pictures RUN=runs/sort-digits-20260101-000000
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from pathlib import Path
from typing import Final

import msgspec
from playwright.sync_api import sync_playwright
from rich.console import Console

from polyrl.history.results import rewards
from polyrl_cli.inspection.top import begun
from polyrl_cli.local.run_folder import RunFolder, find_run
from polyrl_cli.page.page import make_page_of_run, write_page
from polyrl_cli.report.panel import print_summary
from polyrl_cli.report.progress import picture
from polyrl_cli.report.summary import Summary
from polyrl_cli.report.timeline import read_metrics

PICTURES: Final = Path(__file__).parent
WIDTH: Final = 80
PAGE_PX: Final = (1100, 1500)
"""Of the page its first part: the figures and all pictures."""


def recorded() -> Console:
    """A terminal that remembers what was printed."""
    return Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)


def draw_terminal(folder: RunFolder) -> None:
    """The panel that ends a run, and the picture while it goes on."""
    console = recorded()
    summary = msgspec.json.decode(folder.summary.read_bytes(), type=Summary)
    print_summary(summary, Path(os.path.relpath(folder.root)), console, rewards(read_metrics(folder.metrics)))
    console.save_svg(str(PICTURES / "summary.svg"), title="polyrl run")
    console = recorded()
    console.print(picture(begun(folder), WIDTH))
    console.save_svg(str(PICTURES / "top.svg"), title="polyrl top")


def draw_page(folder: RunFolder) -> None:
    """The page, as Chromium shows it."""
    place, make = make_page_of_run(folder.root)
    page_file = write_page(place, make())
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        width, height = PAGE_PX
        page = browser.new_page(viewport={"width": width, "height": height})
        page.goto(page_file.as_uri())
        page.screenshot(path=str(PICTURES / "report.png"))
        browser.close()


def main() -> None:
    """Draws them all of the run that is named."""
    folder = find_run(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    draw_terminal(folder)
    draw_page(folder)


if __name__ == "__main__":
    main()
