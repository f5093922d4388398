"""Every command that README, docs and examples show in a `sh` block is executed here, or by the test named beside it.

A block runs as one script in a copy of the repository's root, as a reader would run it. Blocks that are not meant to
be run as they stand carry another fence (`text`, `console`, `python`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")]
)
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCK_DEADLINE_S = 600
"""Longest block: a short run with its processes' start, a minute on two idle cores and several on busy ones."""

EXECUTED_ELSEWHERE = {
    "make run": "tests/integration/local/test_main_job.py",
    "make test": ".ci/run",
    "make verify": ".ci/run",
    "make install": ".ci/run",
    "make test-sglang": ".ci/run",
    ".ci/run": ".ci/run",
}
"""Commands too long to run twice, and who runs them; the one that runs itself is the one that runs this test."""


RUN = re.compile(r"^(?:\.venv/bin/)?(polyrl run (?:[^\n]*\\\n)*[^\n&]*)$", re.MULTILINE)
"""A run that a page waits for. One that another page has made by the same words lies there already."""
TESTS = re.compile(r"^\.venv/bin/python -m pytest (?=.*\btests/(?:unit|properties)/)", re.MULTILINE)
"""What `make test` runs as it stands: here it is only seen that the command finds its tests."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    script: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        bare = (line.split("#")[0].strip() for line in self.script.splitlines())
        return [line for line in bare if line]


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        found += [Block(page, text.count("\n", 0, m.start()) + 1, script=m.group(1)) for m in BLOCK.finditer(text)]
    return found


EXECUTED_HERE = [block for block in blocks() if not all(command in EXECUTED_ELSEWHERE for command in block.commands)]


def test_the_pages_show_commands() -> None:
    assert any(block.page.name == "README.md" and "make run" in block.commands for block in blocks())


@pytest.mark.parametrize("command", [command for command, by in EXECUTED_ELSEWHERE.items() if command != by])
def test_the_named_test_does_run_it(command: str) -> None:
    assert command in (ROOT / EXECUTED_ELSEWHERE[command]).read_text()


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked and not ignored files, without what runs left behind, and this interpreter's `.venv`."""
    target = tmp_path_factory.mktemp("docs") / "polyrl"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    (target / ".venv").symlink_to(sys.prefix)
    return target


def words_of(run: re.Match[str]) -> str:
    """A run's command on one line."""
    return " ".join(run[1].replace("\\\n", " ").split())


def pages() -> Iterator[ParameterSet]:
    """Each may go to another process, but for those that show the same run: they go where it is made."""
    shown = {
        page: {words_of(run) for block in EXECUTED_HERE if block.page == page for run in RUN.finditer(block.script)}
        for page in dict.fromkeys(block.page for block in EXECUTED_HERE)
    }
    often = {words for words, pages in Counter(chain(*shown.values())).items() if pages > 1}
    for page, runs in shown.items():
        name = str(page.relative_to(ROOT))
        yield pytest.param(page, marks=pytest.mark.xdist_group("shared runs" if runs & often else name), id=name)


def test_a_group_of_tests_goes_to_one_process(request: pytest.FixtureRequest) -> None:
    """A pytest that xdist does not know loses all groups without a word: each process makes anew what they share."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith(f"@{request.node.path}")


@pytest.mark.slow
@pytest.mark.timeout(2 * BLOCK_DEADLINE_S)
@pytest.mark.parametrize("page", list(pages()))
def test_blocks_of_a_page(page: Path, copy: Path, made: set[str]) -> None:
    """In their order, since they build on one another; pages do not, and may be run by different processes."""
    for block in EXECUTED_HERE:
        if block.page == page:
            run(block, copy, made)


@pytest.fixture(scope="session")
def made() -> set[str]:
    """Runs that lie in `copy`, by the command that made them."""
    return set()


def test_a_run_is_made_once_by_the_same_words() -> None:
    made = set[str]()
    script = "polyrl run a.yaml \\\n  --out b\npolyrl ls\n"
    assert without_made(script, made) == script
    assert without_made(".venv/bin/" + script, made) == ":\npolyrl ls\n"
    assert without_made(script.replace("--out b", "--out c"), made) == script.replace("--out b", "--out c")


def without_made(script: str, made: set[str]) -> str:
    def once(found: re.Match[str]) -> str:
        words = words_of(found)
        if words in made:
            return ":"
        made.add(words)
        return found[0]

    return RUN.sub(once, script)


def run(block: Block, copy: Path, made: set[str]) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    answer = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", TESTS.sub(r"\g<0>--collect-only ", without_made(block.script, made))],
        cwd=copy,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=BLOCK_DEADLINE_S,
    )
    assert answer.returncode == 0, f"{block}\n" + answer.stdout[-2000:] + answer.stderr[-4000:]
