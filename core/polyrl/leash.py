"""Ties a process to its parent: the kernel ends it when the parent dies, however the parent dies. Linux only.

Every worker calls `tie_to_parent` first thing in its main, an engine's process likewise. Elsewhere it does nothing, and
the runner's own clean-up must do.

Refuses to hold: gentle endings (a parent that still lives asks with SIGTERM). Read next: `worker`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

PARENT_PID: Final = "POLYRL_PARENT_PID"
"""Environment variable that names the parent. The kernel watches only from the call on; a process whose parent died
before it sees here that it has another one now."""

PR_SET_PDEATHSIG: Final = 1
"""From linux/prctl.h."""


def tie_to_parent() -> None:
    """From now on the kernel sends SIGKILL when the parent's thread that made this process ends.

    Ends the process at once when the parent named in PARENT_PID is already gone.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = os.environ.get(PARENT_PID)
    if parent is not None and os.getppid() != int(parent):
        os._exit(1)
