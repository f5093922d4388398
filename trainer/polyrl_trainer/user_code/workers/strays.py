"""What a worker has started, also where it has left its group, its session and its parent: as proc(5) shows it."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Final

PROCESSES: Final = Path("/proc")
EXEC_S: Final = 1.0
"""Longest wait for processes that are taking up a program: microseconds, or a turn of the others on a crowded core."""
EXEC_POLL_S: Final = 0.001
"""From one look at such a process to the next: nothing tells."""


def started_by(pid: int, variable: str) -> set[int]:
    """Process ids of its descendants, and of all that have this `NAME=value` in their environment."""
    return {*_descendants(pid), *with_variable(variable)}


def with_variable(variable: str, processes: Path = PROCESSES) -> list[int]:
    """Processes that have `variable`, however far from the worker; not those given an environment without it."""
    until, found = time.monotonic() + EXEC_S, []
    for one in processes.glob("[0-9]*"):
        with suppress(OSError):  # another user's, or it has ended
            while _takes_up_a_program(one) and time.monotonic() < until:
                time.sleep(EXEC_POLL_S)
            if variable.encode() in (one / "environ").read_bytes().split(b"\0"):
                found.append(int(one.name))
    return found


def _takes_up_a_program(process: Path) -> bool:
    """Then neither arguments nor environment are there yet, and who started it goes on already: the child of a worker
    that ended right after that was taken for another's. The kernel's own threads have no program."""
    return not (process / "cmdline").read_bytes() and bool((process / "exe").readlink())


def _descendants(pid: int) -> list[int]:
    """Processes that this one started, and those that these did, as long as those between live."""
    found: list[int] = []
    with suppress(OSError):  # it has ended meanwhile, or the kernel does not say
        for children in (PROCESSES / str(pid) / "task").glob("*/children"):
            found += map(int, children.read_text().split())
    return found + [further for child in found for further in _descendants(child)]
