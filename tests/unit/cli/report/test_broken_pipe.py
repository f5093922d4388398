"""Who reads what a command prints may go at any time, a disk may refuse it, a terminal may not show all of it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from polyrl_cli.report.terminal import terminal
console = terminal()
console.print("first")
sys.stdin.readline()
for _ in range(3):
    console.print("unseen")
print("went on", file=sys.stderr)
"""


def test_what_is_under_way_goes_on_when_nobody_reads_it_any_more() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "first\n"
        running.stdout.close()
        running.stdout = None
        _, errors = running.communicate("\n", timeout=60)
    assert (errors, running.returncode) == ("went on\n", 0)


def test_nor_when_the_terminals_window_is_closed() -> None:
    """A run whose window was closed broke off at its next line, without its summary."""
    window, terminal = pty.openpty()
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=pipe, stdout=terminal, stderr=pipe, text=True
    ) as shown:
        os.close(terminal)
        assert os.read(window, 100) == b"first\r\n"
        os.close(window)
        _, errors = shown.communicate("\n", timeout=60)
    assert (errors, shown.returncode) == ("went on\n", 0)


FULL = "not all of the output was written: [Errno 28] No space left on device\n"


def test_nor_when_the_disk_of_its_log_is_full_but_that_is_no_success() -> None:
    """`polyrl run > log` died with a traceback, and left no summary."""
    program = f"from polyrl import interpreter\nwith interpreter.prompt_exit():\n{indented(PROGRAM)}"
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], input=b"\n", stdout=full, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert (done.stderr.decode(), done.returncode) == (f"{FULL}went on\n", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "shell", "status", "shown"),
    [
        ("version", ">/dev/full", 1, FULL),
        ("--help", ">/dev/full", 1, FULL),
        ("ls", ">/dev/full", 1, FULL),
        ("ls", ">&-", 0, ""),
        ("ls gone", "2>&-", 2, ""),
    ],
)
def test_a_command_whose_output_goes_nowhere_ends_in_a_sentence(
    words: str, shell: str, status: int, shown: str
) -> None:
    line = f"exec {sys.executable} -m polyrl_cli.app {words} {shell}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (status, shown)


def test_what_a_terminal_of_another_encoding_cannot_show_is_spelled_out() -> None:
    argv = [sys.executable, "-m", "polyrl_cli.app", "ls", "réwards →".encode()]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(argv, env=environment, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.decode("latin-1")) == (2, "réwards \\u2192: no such folder\n")


def indented(program: str) -> str:
    return "".join(f"    {line}\n" for line in program.splitlines())
