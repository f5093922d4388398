"""An engine's process, seen from its parent: started with a parent death signal, ended within a deadline.

Its output goes to the parent's standard error, so that an engine's last lines are in its agent's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from polyrl import parent_death_signal
from polyrl.forks import Forked, OutputFiles, own_server
from polyrl_rollout.engines.port import EngineFailed

KILL_DEADLINE_S: Final = 10.0
"""A killed process is gone at once; only an uninterruptible one outlasts this, and nothing can be done about it."""
REAP_S: Final = 2.0
"""From the end of a process's socket to its exit status, on a busy machine."""
STDERR: Final = 2
NEUTRAL_FOLDER: Final = "/"
"""Python puts the working folder on its module path; a stray `enum.py` of the user's must not reach the engine."""


def child_path(path: Path) -> str:
    """`path` as a child finds it, which runs in another folder."""
    return str(path.absolute())


class ChildProcess:
    """One running process."""

    def __init__(self, process: asyncio.subprocess.Process | Forked) -> None:
        self._process = process

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        *,
        starts_others: bool = True,
    ) -> ChildProcess:
        """Starts `command`, which does not outlive this process, nor does what it starts. `starts_others`: it might;
        what starts none may be forked. Raises EngineFailed when there can be no process."""
        env = {**os.environ, **(environment or {}), parent_death_signal.PARENT_PID: str(os.getpid())}
        forks = own_server()
        if not starts_others and forks is not None and forks.takes(command, env):
            forked = await forks.fork_beside(
                command, env, OutputFiles(STDERR, STDERR), folder=NEUTRAL_FOLDER, passed=pass_fds
            )
            if forked is not None:
                return cls(forked)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "polyrl_rollout.supervise", "--", *command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.__stderr__,
                env=env,
                cwd=NEUTRAL_FOLDER,
                pass_fds=pass_fds,
                # What a terminal or a fleet sends to this process's group would end it before what it is to end.
                process_group=0,
            )
        except OSError as error:
            raise EngineFailed(f"cannot start {command[0]}: {error}") from error
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    async def was_killed(self) -> bool:
        """Whether a signal ended the process, whose output has just ended."""
        await self._ends_within(REAP_S)
        return self.returncode is not None and self.returncode < 0

    async def end(self, grace_s: float) -> None:
        """Gives it `grace_s` to end by itself, then kills it."""
        if not await self._ends_within(grace_s):
            await self.kill()

    async def kill(self) -> None:
        """Ends it without asking, with all that it started; fine when it has ended."""
        if not isinstance(self._process, Forked):
            # Its supervisor kills what is below; killed itself, it could not.
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
                self._process.send_signal(signal.SIGCONT)  # it may have been frozen together with the others
            if await self._ends_within(KILL_DEADLINE_S):
                return
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._ends_within(KILL_DEADLINE_S)

    async def _ends_within(self, deadline_s: float) -> bool:
        try:
            async with asyncio.timeout(deadline_s):
                await self._ended()
        except TimeoutError:
            return False
        return True

    async def _ended(self) -> int:
        return await (self._process.ended() if isinstance(self._process, Forked) else self._process.wait())
