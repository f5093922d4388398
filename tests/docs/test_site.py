"""The documentation's site is built without a warning, whole, and reading it fetches nothing from elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
BUILD_DEADLINE_S = 240
"""Ten seconds on two idle cores."""
ELSEWHERE = re.compile(r"(?:https?:)?//")
FETCHES = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data", "embed": "src"}
"""What a browser fetches by itself; of `link` only what is no mere relation."""
RELATIONS = {"canonical", "next", "prev", "alternate"}


class Page(HTMLParser):
    """Anchors, links and what is fetched of one page, and its paragraphs' texts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.paragraphs: list[str] = []
        self._inside = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in FETCHES and FETCHES[tag] in given:
            self.fetched.append(given[FETCHES[tag]])
        if tag == "link" and given.get("rel") not in RELATIONS:
            self.fetched.append(given["href"])
        if tag == "p":
            self.paragraphs.append("")
        self._inside = tag == "p" or (self._inside and tag in ("code", "strong", "em", "a"))

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "p"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.paragraphs[-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this checkout, strictly, and not with -q, which hides warnings from strictness as well."""
    folder = tmp_path_factory.mktemp("site")
    answer = subprocess.run(
        [sys.executable, "-P", "-m", "mkdocs", "build", "--site-dir", folder],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=BUILD_DEADLINE_S,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return folder


@cache
def page(path: Path) -> Page:
    return Page(path)


def pages(site: Path) -> list[Path]:
    found = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
    assert len(found) > 40
    return found


def leads_nowhere(path: Path, link: str) -> bool:
    file, _, anchor = unquote(link).partition("#")
    target = (path.parent / file).resolve() if file else path
    if not target.is_file():
        return True
    return bool(anchor) and target.suffix == ".html" and anchor not in page(target).ids


def test_links_of_the_site_lead_to_a_file_and_an_anchor(site: Path) -> None:
    broken = [
        f"{path.relative_to(site)}: {link}"
        for path in pages(site)
        for link in [*page(path).links, *page(path).fetched]
        if not re.match(r"[a-z]+:|//", link) and leads_nowhere(path, link)
    ]
    assert broken == []


def test_reading_fetches_nothing_from_elsewhere(site: Path) -> None:
    fetched = {one for path in site.rglob("*.html") for one in page(path).fetched}
    assert {one for one in fetched if ELSEWHERE.match(one)} == set()
    imported = {
        url
        for path in site.rglob("*.css")
        for url in re.findall(r"(?:url\(|@import\s+)[\"']?([^\"')]+)", path.read_text())
    }
    assert {url for url in imported if ELSEWHERE.match(url)} == set()


def test_lists_and_tables_are_made_as_in_the_repository(site: Path) -> None:
    """Python's Markdown wants an empty line before a list where others want none: then it would be a paragraph."""
    raw = [
        f"{path.relative_to(site)}: {text[:60]}"
        for path in pages(site)
        for text in page(path).paragraphs
        if re.search(r"^(?:[-*|] |\d+\. )", text, re.MULTILINE)
    ]
    assert raw == []


def test_a_search_finds_every_page_but_shown_files(site: Path) -> None:
    found = {
        entry["location"].partition("#")[0]
        for entry in json.loads((site / "search/search_index.json").read_text())["docs"]
    }
    every = {str(path.relative_to(site)) for path in pages(site)}
    assert {name for name in every - found if not name.startswith("source/")} == set()
    assert not any(name.startswith("source/") for name in found)
    assert (site / "search/search_index.js").is_file()
