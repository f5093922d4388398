"""Links of the pages lead to a file that is there and a heading that it has; the picture shows the rooms there are."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "examples", "benchmarks", "charts")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/**/*.md"))])
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
METRICS = ROOT / "docs/reference/metrics.md"
"""Names numbers like rollout/samples, which look like files."""
PACKAGES = {
    "core": "polyrl",
    "cli": "polyrl_cli",
    "operator": "polyrl_operator",
    "rollout": "polyrl_rollout",
    "trainer": "polyrl_trainer",
}
MAX_FILES_OF_A_CHANGE = 5
MAX_MODULES_IN_A_FOLDER = 12
"""As tests/unit/test_house.py has it."""
HEADING = re.compile(r"^#+ (.+?)\s*$", re.MULTILINE)
NAMED_FILE = re.compile(
    r"`((?:core|operator|cli|rollout|trainer|tests|benchmarks|examples|charts|images|make|docs)/[\w./*-]+)"
)


@cache
def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, punctuation dropped, spaces as dashes."""
    headings = HEADING.findall(FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    found = [markdown or html for markdown, html in LINK.findall(FENCED.sub("", page.read_text()))]
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def broken(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return not target.exists() or bool(anchor and target.suffix == ".md" and anchor not in anchors(target))


def test_pages_have_links() -> None:
    assert sum(len(links(page)) for page in PAGES) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert [link for link in links(page) if broken(page, link)] == []


@pytest.mark.parametrize("page", sorted({*PAGES} - {METRICS}), ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_are_there(page: Path) -> None:
    """A star stands for any; NAME for the reader's own."""
    named = {name.rstrip("/.") for name in NAMED_FILE.findall(page.read_text()) if "NAME" not in name}
    assert sorted(name for name in named if not any(ROOT.glob(name))) == []


def test_the_picture_shows_every_room() -> None:
    drawn = (ROOT / "docs/pictures/rooms.svg").read_text()
    packages = [ROOT / top / name for top, name in PACKAGES.items()]
    shown = set(re.findall(r'<tspan font-weight="700">(?:· )?(\w+)</tspan>', drawn))
    folders = {init.parent.name for package in packages for init in package.glob("*/__init__.py")} - {"testing"}
    parts = {path.stem for package in packages for path in package.glob("**/*")}
    assert len(folders) > 20
    assert folders - shown == set()
    assert shown - parts == set()


def usual_changes() -> dict[str, list[str]]:
    """Files by the change that touches them, as CONTRIBUTING lists them."""
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where does X go?")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")][1:]
    return {change.strip(): re.findall(r"`([^` ]+[./][^` ]+)`", files) for change, files in rows}


def test_a_usual_change_touches_few_files() -> None:
    changes = usual_changes()
    assert len(changes) >= 10
    assert {change: files for change, files in changes.items() if not 1 < len(files) <= MAX_FILES_OF_A_CHANGE} == {}
    # A new file's folder is there, and what is not new is.
    named = {file for files in changes.values() for file in files}
    places = {file.partition("NAME")[0].rpartition("/")[0] if "NAME" in file else file for file in named}
    assert sorted(place for place in places if not (ROOT / place).exists()) == []


def test_a_folder_of_a_usual_change_takes_one_more_module() -> None:
    named = {file for files in usual_changes().values() for file in files if file.endswith("NAME.py")}
    folders = {file.rpartition("/")[0] for file in named}
    full = {folder for folder in folders if len(list((ROOT / folder).glob("*.py"))) >= MAX_MODULES_IN_A_FOLDER}
    assert full == set()
