"""The manager under test: its real process with journal and CURVE, and what the system says it uses."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from polyrl.control import Endpoints, parse_endpoints
from polyrl.parent_death_signal import PARENT_PID
from polyrl_operator.secret import write_run_keys

EPOCH: Final = 1
START_S: Final = 30.0
POLL_S: Final = 0.02

JOB: Final[Mapping[str, Any]] = {
    "apiVersion": "polyrl.dev/v1alpha1",
    "kind": "PolyRLJob",
    "metadata": {"name": "manager-benchmark"},
    "spec": {
        "recipe": {
            "mode": "rl",
            "model": {"path": "model"},
            "data": {"rl": [{"path": "prompts.jsonl"}]},
            "reward": {"function": "reward:score"},
            "algorithm": {"steps": 1},
        },
        "rollout": {"engine": {"maxContext": 1 << 20, "maxRunning": 1 << 16}},
    },
}


@dataclass(frozen=True)
class Stand:
    """A running manager."""

    process: psutil.Process
    endpoints: Endpoints
    folder: Path

    def cpu_s(self) -> float:
        """User and system seconds of all its threads so far: libzmq's too, where CURVE is done."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def rss(self) -> int:
        return int(self.process.memory_info().rss)

    def written(self) -> int:
        """Bytes handed to the file system so far: journal and write-ahead log."""
        return int(self.process.io_counters().write_bytes)

    def check(self) -> None:
        """Ends the benchmark, with the manager's last words, when the manager has ended."""
        if not self.process.is_running() or self.process.status() == psutil.STATUS_ZOMBIE:
            words = (self.folder / "manager.log").read_text().splitlines()
            raise SystemExit(f"the manager has ended: {words[-1] if words else 'it sent nothing'}")

    def journal_bytes(self) -> int:
        """What the journal takes on the disk now."""
        return sum(path.stat().st_size for path in self.folder.glob("journal.sqlite*"))


@asynccontextmanager
async def standing(folder: Path, core: int | None, job: Mapping[str, Any] = JOB) -> AsyncIterator[Stand]:
    """A manager in `folder`, ready; on one core if `core` names it."""
    write_run_keys(folder / "keys")
    (folder / "job.json").write_text(json.dumps(job))
    file = folder / "manager.json"
    command = [] if core is None else ["taskset", "-c", str(core)]
    command += [sys.executable, "-m", "polyrl_rollout.manager", "--job", str(folder / "job.json")]
    command += ["--epoch", str(EPOCH), "--keys", str(folder / "keys/manager.key"), "--endpoints", str(file)]
    command += ["--journal", str(folder / "journal.sqlite")]
    with (folder / "manager.log").open("wb") as log:
        environment = {**os.environ, PARENT_PID: str(os.getpid())}
        process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=log)
    try:
        async with asyncio.timeout(START_S):
            while not file.exists():  # noqa: ASYNC110 - nothing announces a file
                await asyncio.sleep(POLL_S)
        yield Stand(psutil.Process(process.pid), parse_endpoints(file.read_bytes(), str(file)), folder=folder)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
