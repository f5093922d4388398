"""Commands that pages name inline or in blocks that no test runs: the target, the command and its flags are there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from polyrl_cli.app import app

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "examples", "benchmarks", "charts")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/**/*.md"))])
FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
BEGINS = r"(?:^|[;&|$]|\b(?:time|nice))\s*(?:\w+=\S+\s+)*"
MAKE = re.compile(BEGINS + r"make((?:\s+[\w=./\"-]+)+)")
POLYRL = re.compile(BEGINS + r"(?:\S*/)?polyrl ([a-z][\w-]*)([^;&|#]*)")
FLAG = re.compile(r"(?<!\S)(--[a-z][a-z-]*)")


def texts(page: Path) -> list[str]:
    """Code spans, and lines of blocks with their continuations."""
    text = page.read_text()
    blocks = "\n".join(FENCED.findall(text)).replace("\\\n", " ")
    return [*INLINE.findall(FENCED.sub("", text)), *(line.strip() for line in blocks.splitlines())]


@cache
def targets() -> set[str]:
    files = [ROOT / "Makefile", *(ROOT / "make").glob("*.mk")]
    return {target for file in files for target in re.findall(r"^([a-z][\w-]*):", file.read_text(), re.MULTILINE)}


@cache
def flags() -> dict[str, set[str]]:
    """By command."""
    group: Any = typer.main.get_command(app)
    return {
        name: {"--help"} | {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
        for name, command in group.commands.items()
    }


def unknown(text: str) -> list[str]:
    """What a code span or a line of a block names and nothing has."""
    named = [word for match in MAKE.finditer(text) for word in match[1].split() if re.fullmatch(r"[a-z][\w-]*", word)]
    found = [f"make {target}" for target in named if target not in targets()]
    for command, rest in POLYRL.findall(text):
        if command not in flags():
            found.append(f"polyrl {command}")
        else:
            found += [f"polyrl {command} {flag}" for flag in FLAG.findall(rest) if flag not in flags()[command]]
    return found


def test_pages_name_commands() -> None:
    named = [text for page in PAGES for text in texts(page)]
    assert sum(bool(MAKE.search(text)) for text in named) > 20
    assert sum(bool(POLYRL.search(text)) for text in named) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_are_named_are_there(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # what was is written as it was called
    assert [wrong for text in texts(page) for wrong in unknown(text)] == []
