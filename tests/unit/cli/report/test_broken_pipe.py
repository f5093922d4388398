"""Who reads what a command prints may go at any time."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

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
