"""Ties a process to its parent: when the parent dies, by whatever signal, the kernel ends or signals this process too.

Called once, first thing, by every process that another one starts. Linux only; elsewhere only the first check is made.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

PARENT_PID: Final = "POLYRL_PARENT_PID"
"""Environment variable in which a parent gives its children its own process id."""

PR_SET_PDEATHSIG: Final = 1
"""prctl's option number, from <linux/prctl.h>."""
PR_SET_CHILD_SUBREAPER: Final = 36
"""The same."""


def hold(by: signal.Signals = signal.SIGKILL) -> None:
    """From here on this process gets signal `by` when its parent ends. Exits at once when the parent is already gone.

    Without POLYRL_PARENT_PID in the environment nobody claims this process, and it lives on its own.
    """
    claimed = os.environ.get(PARENT_PID)
    if claimed is None:
        return
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, by) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(claimed):
        sys.exit(f"the process {claimed} that started this one is gone")


def adopt_orphans(wanted: bool) -> None:
    """Whether orphans below this process become its children from here on, which it then waits for."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(wanted)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end_parent() -> None:
    """Ends the process that claimed this one, frozen or not; a container's first process only its machine can."""
    if os.environ.get(PARENT_PID) == str(os.getppid()):
        os.kill(os.getppid(), signal.SIGKILL)
