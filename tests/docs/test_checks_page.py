"""The page of twenty checks: all twenty are there, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/checks.md"
CHECKS = 20
NAMED = re.compile(r"`((?:tests/[\w/]+\.py)?)::(\w+)`")


def rows() -> list[str]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [line for line in lines if not line.endswith("| shown by |")]


def named_in(row: str) -> list[tuple[str, str]]:
    """File and function; a function without a file is of the file before it."""
    named, file = [], ""
    for given, function in NAMED.findall(row):
        file = given or file
        named.append((file, function))
    return named


NAMES = sorted({named for row in rows() for named in named_in(row)})


def test_all_are_there_each_with_a_test_or_a_reason() -> None:
    numbered = [row for row in rows() if re.match(r"\| \d", row)]
    assert [int(row.split("|")[1]) for row in numbered] == list(range(1, CHECKS + 1))
    bare = [row for row in rows() if not named_in(row) and not re.search(r"\| (No test: .+|Not tried) ", row)]
    assert not bare


@pytest.mark.parametrize(("file", "function"), NAMES, ids=[f"{file}::{function}" for file, function in NAMES])
def test_the_test_exists(file: str, function: str) -> None:
    path = ROOT / file
    assert path.is_file(), f"{PAGE.name} names {file}, which is not there"
    tree = ast.parse(path.read_text())
    made = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert function in made, f"{PAGE.name} names {file}::{function}, which is not there"
