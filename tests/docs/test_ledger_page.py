"""The ledger's page names, beside each defect that was mended, a test that exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = (ROOT / "docs/explanation/ledger.md").read_text()
TESTS: Final = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
ROWS: Final = [
    line
    for line in PAGE.partition("\n## Before and after\n")[2].partition("\n## ")[0].splitlines()
    if line.startswith("| ") and not line.startswith("| what was wrong")
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_each_defect_that_was_mended_is_held_by_something_that_exists(row: str) -> None:
    held_by = re.findall(r"`([^`]+)`", row.split("|")[-2])
    assert held_by
    for name in held_by:
        assert (ROOT / name).exists() if "/" in name else f"def {name}(" in TESTS


def test_the_table_is_there() -> None:
    assert len(ROWS) > 10
