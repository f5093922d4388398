"""Runs CMD, and ends it with all that it started, however deep, when CMD ends or the parent of this process does.

    python -m polyrl_rollout.supervise -- CMD ARGS...

For programs that start others: SGLang's processes tie themselves to each other only once they have imported everything,
and whoever lost its server before that would stay for good, with a GPU's memory. The parent gives its process id in
`polyrl.parent_death_signal.PARENT_PID`, and ends all by SIGTERM. This process ends as CMD did: by the same signal, or
with the same status.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from typing import Final, Never

import psutil

from polyrl import parent_death_signal

EXIT_NOT_FOUND: Final = 127
"""What a shell exits with when there is no such program."""
FIRST_PASSED: Final = 3
"""File descriptors from here on are the command's; those below are standard."""
ENDS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The last one comes from the kernel, which has those go on that stood still when their parent ended."""
AWAITED: Final = (*ENDS, signal.SIGCHLD, signal.SIGALRM)
IGNORED_BY_PYTHON: Final = (signal.SIGPIPE, signal.SIGXFSZ)
KILLED_S: Final = 8.0
"""A GPU's memory takes seconds to be given back. Less than an agent waits for all this (`KILL_DEADLINE_S`)."""


def main(argv: list[str]) -> Never:
    """`-- CMD ARGS...`. Exits 1 without a command, EXIT_NOT_FOUND when CMD cannot be started."""
    if len(argv) < 2 or argv[0] != "--":
        sys.exit("usage: python -m polyrl_rollout.supervise -- CMD [ARGS...]")
    # Before the parent's death can be signalled: a signal that nobody awaits yet waits itself.
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who started this may have it ignored, and no end would be seen
    parent_death_signal.adopt_orphans(True)
    parent_death_signal.hold(signal.SIGTERM)
    child = _start(argv[1:])
    while (status := _ended(child)) is None:
        signal_number = signal.sigwait(AWAITED)
        if signal_number in ENDS:
            _end_all()
            _die_by(signal_number)
    _end_all()
    if (code := os.waitstatus_to_exitcode(status)) < 0:
        _die_by(-code)
    sys.exit(code)


def _start(command: list[str]) -> int:
    """Process id of `command`, which a kill of this process ends too."""
    own = os.getpid()
    if child := os.fork():
        # An end of what CMD writes to must not wait for this process.
        os.closerange(FIRST_PASSED, os.sysconf("SC_OPEN_MAX"))
        return child
    os.environ[parent_death_signal.PARENT_PID] = str(own)
    parent_death_signal.hold()
    # CMD is the parent of its own children: a value meant for it would end them.
    del os.environ[parent_death_signal.PARENT_PID]
    for number in IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(EXIT_NOT_FOUND)


def _ended(child: int) -> int | None:
    """The wait status of `child` once it has ended. Orphans that have are forgotten."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            raise AssertionError("somebody else has waited for the child") from None
        if pid == child:
            return status
        if pid == 0:
            return None


def _end_all() -> None:
    """Kills all below and waits for them, at most KILLED_S. Who loses its parent by that comes here, and is next."""
    signal.setitimer(signal.ITIMER_REAL, KILLED_S)
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        left = _kill_children()
        if signal.sigwait((signal.SIGCHLD, signal.SIGALRM)) == signal.SIGALRM:
            print(f"still there {KILLED_S:g} s after they were killed: {left}", file=sys.stderr, flush=True)
            return


def _kill_children() -> list[int]:
    """Their process ids. None is of somebody else's: nobody has waited for them yet."""
    # `psutil.Process.children` fails as a whole where other accounts' processes are hidden.
    own = os.getpid()
    children = [one.pid for one in psutil.process_iter(["ppid"]) if one.info["ppid"] == own]
    for pid in children:
        with contextlib.suppress(PermissionError):  # another account's by now
            os.kill(pid, signal.SIGKILL)
    return children


def _die_by(number: int) -> Never:
    """As if that signal had been ours, without writing another core file beside the child's."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    raise AssertionError(f"signal {number} ends no process")


if __name__ == "__main__":
    main(sys.argv[1:])
