"""The page on security: each section says which tests hold it, each line of the review has one, and all exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/explanation/security.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
NAMED = re.compile(r"`((?:[\w./-]+/)?(?:test_\w+|cost|hostile_jobs)\.py)`")
REVIEW = "What a review found, before and now"


def named_in(text: str) -> list[Path]:
    """Bare names are of the folder that was named before them."""
    found, folder = list[Path](), ROOT
    for name in NAMED.findall(text):
        folder = (ROOT / name).parent if "/" in name else folder
        found.append(folder / Path(name).name)
    return found


@pytest.mark.parametrize("section", SECTIONS)
def test_each_section_names_tests_that_exist(section: str) -> None:
    named = named_in(SECTIONS[section])
    assert named
    assert [str(path.relative_to(ROOT)) for path in named if not path.is_file()] == []
    assert [path.name for path in named if path.name.startswith("test_") and "def test_" not in path.read_text()] == []


LISTED = r"^- .*\n?(?:  .*\n?)*"
TESTS = re.compile(r"`(?:[\w./-]+/)?(?:test_\w+|cost|run)\.py`|[Nn]ot tested|the same `test_")
NO_CLAIM = ("#", "|", "!", "What is left", "What is not")
MAX_INTRODUCTION = 2
"""Sentences that say what a section is about."""


def claims(page: str) -> list[str]:
    """Its paragraphs and the lines of its lists, but those that claim nothing."""
    found, first = list[str](), False
    for block in page.partition("\n\n")[2].split("\n\n"):
        introduces = block.rstrip().endswith(":") or (
            first and len(re.findall(r"[.:](?:\s|$)", block)) <= MAX_INTRODUCTION
        )
        first = block.startswith("## ")
        if not introduces and not block.startswith(NO_CLAIM):
            found += re.findall(LISTED, block, re.MULTILINE) or [block]
    return found


@pytest.mark.parametrize("claim", claims(PAGE), ids=lambda text: text[:40])
def test_each_paragraph_names_its_tests_or_says_that_it_has_none(claim: str) -> None:
    assert TESTS.search(claim)


def test_a_paragraph_without_tests_is_a_claim_unless_it_begins_as_one_that_claims_nothing() -> None:
    page = (
        "# P\n\n## Section\n\nAbout it.\n\nNobody gets in.\n\nWhat is left: him.\n\nThree:\n\n- one\n- two\n  lines\n"
    )
    assert claims(page) == ["Nobody gets in.", "- one\n", "- two\n  lines\n"]


def test_claims_are_found() -> None:
    assert len(claims(PAGE)) > 60


def test_each_line_of_the_review_has_a_before_a_now_and_a_test() -> None:
    table = SECTIONS[REVIEW].partition("|---|\n")[2].partition("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()]
    assert len(rows) > 30
    assert [cells[0] for cells in rows if len(cells) != 4 or not all(cells)] == []
    assert [cells[0] for cells in rows if not NAMED.search(cells[3]) and "the same" not in cells[3]] == []


def test_every_test_of_the_red_team_is_on_the_page() -> None:
    named = {path for text in SECTIONS.values() for path in named_in(text)}
    assert sorted(path.name for path in set((ROOT / "tests/security").glob("test_*.py")) - named) == []
