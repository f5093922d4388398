"""Ends this process when its parent ends, however the parent ends: no orphan survives a kill -9.

Linux: the kernel does it (prctl PR_SET_PDEATHSIG, SIGKILL); it survives exec, so `python -m polyrl_rollout.leash -- CMD ...`
puts any program on a leash. Elsewhere: a thread looks whether the parent is still the same, which exec does not survive.

A parent that died before the leash was on is noticed through POLYRL_PARENT_PID, which it sets to its own process id.

Refuses to hold: grandchildren; each generation puts on its own leash. Read next: `agent.__main__`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from typing import Final

PARENT_ENV: Final = "POLYRL_PARENT_PID"
PR_SET_PDEATHSIG: Final = 1
"""From <linux/prctl.h>."""
LOOK_SECONDS: Final = 1.0
"""Pause between looks at the parent where the kernel does not tell."""
EXIT_ORPHANED: Final = 75
"""EX_TEMPFAIL of sysexits.h: nobody reads it but logs."""


def put_on() -> None:
    """From now on this process ends with its parent. Ends it at once when the parent is gone already."""
    parent = int(os.environ.get(PARENT_ENV, os.getppid()))
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=_watch, args=(parent,), name="leash", daemon=True).start()
    if os.getppid() != parent:
        os._exit(EXIT_ORPHANED)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os._exit(EXIT_ORPHANED)


def main(argv: list[str]) -> None:
    """`-- CMD ARGS...`: puts the leash on and becomes CMD. Exits 2 without a command, 127 when there is no such program."""
    if len(argv) < 2 or argv[0] != "--":
        sys.exit("usage: python -m polyrl_rollout.leash -- CMD [ARGS...]")
    put_on()
    # The parent of CMD's own children is CMD: a value meant for us would end them.
    os.environ.pop(PARENT_ENV, None)
    try:
        os.execvp(argv[1], argv[1:])
    except OSError as error:
        print(f"{argv[1]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
