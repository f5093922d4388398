"""Runs a program in a confined process (`confined.py`), and says what came of it."""

import os
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from confined import FILE_BYTES, READY

CONFINED = Path(__file__).with_name("confined.py")
START_S = 10.0
"""Until Python has started and confined itself: 0.05 s, on a busy machine many times that."""


class SandboxUnavailable(Exception):
    """This machine cannot confine a program. The sample is discarded for it, not scored."""


@dataclass(frozen=True)
class ProgramRun:
    """What a program did."""

    output: str
    """At most 1 MiB of what it printed."""
    ended: bool
    """By itself and without an error; otherwise an exception, a limit or the deadline ended it."""
    timed_out: bool


def run(program, cpu_seconds=1, memory_mb=256, wall_seconds=4.0):
    """Runs `program` to its end or to a limit. Raises SandboxUnavailable."""
    # Files without names: nothing is left of them, however this process or that one ends. Output goes to one too, since
    # its size is a limit of the process: a pipe would be this process's memory.
    with tempfile.TemporaryFile() as scratch, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-BEs", str(CONFINED), str(cpu_seconds), str(memory_mb), str(scratch.fileno())],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.PIPE,
            pass_fds=[scratch.fileno()],
            env={},  # nothing of the trainer's
            cwd="/",
            start_new_session=True,
        )
        try:
            await_ready(process)
            process.communicate(program.encode(errors="surrogatepass"), timeout=wall_seconds)
            timed_out = process.returncode == -signal.SIGKILL
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        output.seek(0)
        printed = output.read(FILE_BYTES).decode(errors="replace")
    return ProgramRun(printed, process.returncode == 0, timed_out)


def await_ready(process):
    """Returns once the process has confined itself; it has not read the program before. Raises SandboxUnavailable."""
    heard, _, _ = select.select([process.stderr], [], [], START_S)
    line = process.stderr.readline().decode(errors="replace").strip() if heard else f"no answer within {START_S:g} s"
    if line != READY:
        raise SandboxUnavailable(line)
