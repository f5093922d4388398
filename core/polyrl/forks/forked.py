"""A process that was forked for this one, as its parent sees it. Named and behaving as `subprocess.Popen`, with
asyncio's way to wait beside."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import threading
from contextlib import suppress
from typing import Final

UNKNOWN: Final = 255
"""Exit code of one that somebody else in this process has waited for, as asyncio has it."""


class Forked:
    """A child of this process. It must be waited for, as any child."""

    def __init__(self, pid: int, command: tuple[str, ...]) -> None:
        """`pid`: of a child that nobody else waits for."""
        self.pid = pid
        self.args = command
        self._code: int | None = None
        self._reaping = threading.Lock()

    @property
    def returncode(self) -> int | None:
        """None while it runs; -N: ended by signal N."""
        return self.poll()

    def poll(self) -> int | None:
        """Looks whether it has ended."""
        with self._reaping:
            if self._code is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:
                    self._code = UNKNOWN
                else:
                    self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.poll() is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                poll.poll(None if timeout is None else 1000 * timeout)
            finally:
                os.close(descriptor)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    async def ended(self) -> int:
        """Its exit code, once there is one."""
        if self.poll() is None:
            loop, over = asyncio.get_running_loop(), asyncio.Event()
            descriptor = os.pidfd_open(self.pid)
            loop.add_reader(descriptor, over.set)
            try:
                await over.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        code = self.poll()
        assert code is not None, "the kernel reported an end"
        return code

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it by force."""
        self.send_signal(signal.SIGKILL)
