"""Libraries are loaded without the garbage collector, and it works again afterwards, whatever happened; a prompt end is
no better than an ordinary one."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyrl import interpreter


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_the_collector_rests_meanwhile_and_never_looks_at_what_was_loaded() -> None:
    with interpreter.loading():
        assert not gc.isenabled()
        loaded = [[]]
    assert gc.isenabled()
    assert not any(one is loaded for one in gc.get_objects())


def test_a_library_that_is_not_there_leaves_the_collector_working() -> None:
    with pytest.raises(ModuleNotFoundError), interpreter.loading():
        import no_such_library  # noqa: F401
    assert gc.isenabled()


@pytest.mark.parametrize(("code", "ends"), [(0, 1), (75, 75)], ids=["success", "to be tried again"])
def test_output_that_a_full_disk_refused_is_no_success_and_changes_no_other_code(code: int, ends: int) -> None:
    script = f"import sys; from polyrl.interpreter import *\nwith prompt_exit(): print('lost'); sys.exit({code})"
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-I", "-c", script], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == ends
    assert b"No space left on device" in done.stderr


LEAVES_OPEN = """
import fcntl, os, sys
from polyrl.interpreter import prompt_exit
text, binary, (reading, writing) = open(sys.argv[1], "w"), open(sys.argv[2], "wb"), os.pipe()
os.write(writing, bytes(fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)))
full = open(writing, "wb")
with prompt_exit():
    text.write("last")
    binary.write(b"last")
    full.write(b"nobody reads it")
"""


def test_what_user_code_has_left_open_is_written(tmp_path: Path) -> None:
    """Of a file that its own loss wrote to, a trainer lost what no buffer had handed on."""
    files = [tmp_path / "text", tmp_path / "binary"]
    subprocess.run([sys.executable, "-P", "-c", LEAVES_OPEN, *files], check=True, timeout=60)
    assert [file.read_text() for file in files] == ["last", "last"]


def test_how_a_trainer_ended_survives_readers_that_are_gone() -> None:
    """Exit codes 75 and 143 became 1, where the last flush raised."""
    script = "import os; from polyrl.interpreter import flushed; print('x', end=''); flushed(); os._exit(75)"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-I", "-c", script], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (75, b"")
