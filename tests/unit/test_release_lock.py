"""The lock has a hash of every file of every pin, and pins what constraints.txt and pyproject.toml say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from release.lock import LOCK, PINS, NotLocked, entries_of, lock_refusals, select

ROOT = Path(__file__).parents[2]
PYPROJECT = """
[project]
name = "polyrl"
dependencies = ["numpy>=2.2,<3"]
[project.optional-dependencies]
tools = ["polyrl[other]", "Typing_Extensions>=4"]
sglang = ["sglang==0.5.23"]
"""
CONSTRAINTS = "numpy==2.4.6\ntyping-extensions==4.16.0\n"
HASHES = [f"--hash=sha256:{digit * 64}" for digit in "ab"]
MORE = " \\\n    "
LOCKED = MORE.join(
    ["# by a command\nnumpy==2.4.6", HASHES[0], f"{HASHES[1]}\ntyping-extensions==4.16.0", f"{HASHES[1]}\n"]
)

CASES = [
    pytest.param(
        LOCKED.replace(f" \\\n    {HASHES[1]}\n", "\n", 2).replace(f" \\\n    {HASHES[0]}", ""),
        [
            "constraints.lock: numpy==2.4.6 has no hash; `make lock` writes it",
            "constraints.lock: typing-extensions==4.16.0 has no hash; `make lock` writes it",
        ],
        id="no hash",
    ),
    pytest.param(
        LOCKED.replace(HASHES[0], f"--hash=md5:{'a' * 32}"),
        [f"constraints.lock: numpy==2.4.6 has --hash=md5:{'a' * 32}; a hash is --hash=sha256: and 64 digits"],
        id="a weak hash",
    ),
    pytest.param(
        LOCKED.replace(HASHES[0], "--hash=sha256:ab"),
        ["constraints.lock: numpy==2.4.6 has --hash=sha256:ab; a hash is --hash=sha256: and 64 digits"],
        id="half a hash",
    ),
    pytest.param(
        LOCKED.partition("typing")[0],
        ["constraints.lock: typing-extensions==4.16.0 of constraints.txt is not in it; `make lock` writes it"],
        id="a pin is missing",
    ),
    pytest.param(
        LOCKED + f"more==1.0 {HASHES[0]}\n",
        ["constraints.lock: constraints.txt has no more==1.0; `make lock` writes it"],
        id="a pin more",
    ),
    pytest.param(
        LOCKED + f"numpy==2.4.5 {HASHES[0]}\n",
        [
            "constraints.lock: numpy stands there twice; `make lock` writes it",
            "constraints.lock: constraints.txt has no numpy==2.4.5; `make lock` writes it",
        ],
        id="a second version",
    ),
    pytest.param(
        f"--index-url {HASHES[0]}\n" + LOCKED,
        [
            "constraints.lock: --index-url is no name==version; `make lock` writes it",
            "constraints.lock: constraints.txt has no --index-url; `make lock` writes it",
        ],
        id="an option",
    ),
]


def test_a_lock_that_fits() -> None:
    assert lock_refusals(PYPROJECT, CONSTRAINTS, LOCKED) == []


@pytest.mark.parametrize(("lock", "sentences"), CASES)
def test_a_lock_that_does_not_fit(lock: str, sentences: list[str]) -> None:
    assert lock_refusals(PYPROJECT, CONSTRAINTS, lock) == sentences


@pytest.mark.parametrize("line", ["numpy>=3", "absent"])
def test_a_requirement_that_nothing_pins(line: str) -> None:
    assert lock_refusals(PYPROJECT.replace("numpy>=2.2,<3", line), CONSTRAINTS, LOCKED) == [
        f"constraints.txt: {line} of pyproject.toml is not pinned; `make constraints` writes it"
    ]


def test_what_is_installed_is_taken_from_the_lock() -> None:
    assert select(LOCKED, ["Typing_Extensions==4.16.0"]) == f"typing-extensions==4.16.0 {HASHES[1]}\n"
    with pytest.raises(NotLocked, match=r"^constraints.lock has no numpy==2.4.7, which is installed; "):
        select(LOCKED, ["numpy==2.4.7"])


def test_the_lock_of_this_tree_fits_it_and_names_no_index() -> None:
    texts = [(ROOT / name).read_text() for name in ("pyproject.toml", PINS, LOCK)]
    assert lock_refusals(*texts) == []
    assert len(entries_of(texts[2])) > 200
    assert not re.search("https?:", texts[2])
