"""Processes that tests start: forked from one that has loaded torch and transformers, where there is one; most of what
many tests cost would else be to load them."""

from __future__ import annotations

import inspect
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from polyrl.forks import OutputFiles, own_server

INHERITED = -1
"""What Popen calls a stream that is this process's own."""


class StartedProcess(subprocess.Popen[Any]):
    """As Popen, of a command that reads nothing."""

    def _execute_child(self, *given: Any, **named: Any) -> None:
        plan = inspect.signature(subprocess.Popen._execute_child).bind(self, *given, **named).arguments  # type: ignore[attr-defined]
        command, environment = list(map(str, plan["args"])), dict(plan["env"] or os.environ)
        forks = own_server()
        if forks is None or plan["p2cwrite"] != INHERITED or not forks.takes(command, environment):
            super()._execute_child(*given, **named)  # type: ignore[misc]
            return
        out = 1 if plan["c2pwrite"] == INHERITED else plan["c2pwrite"]
        err = 2 if plan["errwrite"] == INHERITED else plan["errwrite"]
        forked = forks.fork(
            command,
            environment,
            OutputFiles(out, err),
            folder=os.fspath(plan["cwd"]) if plan["cwd"] else None,
            passed=plan["pass_fds"],
            own_session=plan["start_new_session"],
            starts_others=True,
        )
        if forked is None:
            super()._execute_child(*given, **named)  # type: ignore[misc]
            return
        self.pid, self._child_created = forked.pid, True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(plan[name] for name in ends))  # type: ignore[attr-defined]


def ran(
    command: Sequence[str], *, timeout_s: float, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """How it ended and all that it printed; killed, and raises subprocess.TimeoutExpired, after `timeout_s`."""
    pipe = subprocess.PIPE
    with StartedProcess(command, stdout=pipe, stderr=pipe, text=True, cwd=cwd, env=env) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def words_of(process: psutil.Process) -> list[str]:
    """The command line of a process that may have been forked: its title then, in the place of a longer one. None of
    one that has ended, whether it was waited for or not."""
    try:
        return " ".join(process.cmdline()).split()
    except psutil.NoSuchProcess:  # a zombie is one, for psutil
        return []
