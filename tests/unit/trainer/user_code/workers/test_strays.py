"""Who is found of what a worker has started; processes as folders, as the kernel shows them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from polyrl_trainer.user_code.workers import strays

MARKED = "MARK=1"


def process(folder: Path, pid: int, arguments: str, environment: str, program: str | None = "/bin/sleep") -> Path:
    """One of a machine's; a thread of the kernel has no program."""
    own = folder / str(pid)
    own.mkdir()
    (own / "environ").write_text(environment)
    (own / "cmdline").write_text(arguments)
    if program is not None:
        (own / "exe").symlink_to(program)
    return own


def test_all_with_the_variable_are_found_and_nobody_else(tmp_path: Path) -> None:
    process(tmp_path, 11, "sleep\0", f"A=b\0{MARKED}\0")
    process(tmp_path, 12, "sleep\0", f"A=b\0{MARKED}2\0")
    process(tmp_path, 13, "sleep\0", "")
    process(tmp_path, 14, "", "", program=None)
    (tmp_path / "15").mkdir()
    (tmp_path / "self").mkdir()
    began = time.monotonic()
    assert strays.with_variable(MARKED, tmp_path) == [11]
    assert time.monotonic() - began < strays.EXEC_S, "nobody was waited for"


def test_one_that_is_taking_up_its_program_is_found(tmp_path: Path) -> None:
    young = process(tmp_path, 11, "", "")

    def go_on() -> None:
        (young / "environ").write_text(f"{MARKED}\0")
        (young / "cmdline").write_text("sleep\0")

    timer = threading.Timer(0.05, go_on)
    timer.start()
    assert strays.with_variable(MARKED, tmp_path) == [11]
    timer.join()


def test_one_that_never_has_taken_it_up_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strays, "EXEC_S", 0.02)
    process(tmp_path, 11, "", "")
    process(tmp_path, 12, "sleep\0", f"{MARKED}\0")
    assert strays.with_variable(MARKED, tmp_path) == [12]
