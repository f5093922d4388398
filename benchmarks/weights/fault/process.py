"""A process of `faults`, which the kernel ends with this one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from polyrl.parent_death_signal import PARENT_PID

PROGRAMS: Final = Path(__file__).parents[1]


class Process:
    """One that answers in lines of JSON."""

    def __init__(self, program: str, *arguments: str) -> None:
        self._argv = [sys.executable, str(PROGRAMS / program), *arguments]

    async def start(self) -> None:
        env = {**os.environ, PARENT_PID: str(os.getpid()), "OMP_NUM_THREADS": "1"}
        self.process = await asyncio.create_subprocess_exec(
            *self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
        )

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None

    async def send_line(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self.process.stdin.write(line.encode() + b"\n")
            await self.process.stdin.drain()

    async def read_line(self) -> dict[str, Any] | None:
        """None once it has ended."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        found: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
        return found

    def send(self, number: signal.Signals) -> None:
        if self.is_alive:
            self.process.send_signal(number)

    async def end(self) -> None:
        self.send(signal.SIGKILL)
        await self.process.wait()
