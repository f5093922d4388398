"""The fleet on one machine: every worker is a process in a session of its own, its output in `logs/<name>.log`;
the trainer's standard output, which is user code's, in `logs/prints.log`.

No orphan survives the runner: workers end themselves when it dies (each ties itself to POLYRL_PARENT_PID), and here the
whole process group of a worker is ended by force when the worker itself has exited, was killed, or outlived its grace.
Workers get only the few variables that `polyrl.manifest.environment` names, and no file but their log; our own secrets
reach them as 0600 files.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import signal
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil

from polyrl.forks import Forked, ForkServer, OutputFiles
from polyrl.local.planner import ObservedWorker, Reclaim, WorkerPhase
from polyrl.worker import Role, Worker
from polyrl_cli.chaos.kinds import Part
from polyrl_cli.environment import process_environment
from polyrl_cli.local.ownership import OTHERS_NOTHING
from polyrl_cli.local.run_folder import PRINTS

CANNOT_START: Final = 127
"""Exit code of a worker whose program could not be started; as in a shell."""

ORPHANS_POLL_S: Final = 0.02
"""Between two checks of what a killed group has left; most are gone at the first."""

KILL_WAIT_S: Final = 10.0
"""How long the kernel may take to reap a killed process on a machine that swaps."""


@dataclass
class _Child:
    seen: ObservedWorker
    process: asyncio.subprocess.Process | Forked | None = None
    tree: psutil.Process | None = None
    """Knows the moment of the process's start, so that a process that got its id later is not signalled."""
    waiter: asyncio.Task[None] | None = None
    force: asyncio.TimerHandle | None = None
    """Ends it when its grace is over."""


class ProcessFleet:
    """Starts and ends single workers, and reports what it sees; the planner decides. Names are used once: an exited
    worker stays listed, and its name starts nothing again. To end a worker that is gone or was never there is fine.
    Must be closed."""

    def __init__(self, logs: Path, forks: ForkServer | None = None) -> None:
        """`forks`: makes the workers that it takes; the others are spawned."""
        self._logs, self._forks = logs, forks
        self._children: dict[str, _Child] = {}
        self._change = asyncio.Event()

    def now(self) -> float:
        """Seconds on the clock of every time this fleet reports."""
        return time.monotonic()

    def fork_no_more(self) -> None:
        """What is started, also at this moment, is spawned: forks are long in coming while the run's server loads."""
        if self._forks is not None:
            self._forks.close()

    async def list(self) -> builtins.list[ObservedWorker]:
        """Every worker ever started, oldest first."""
        self._change.clear()
        return [child.seen for child in self._children.values()]

    async def start(self, worker: Worker) -> None:
        """Starts `worker`; does nothing when one of its name was started before, so a repeat is harmless. A worker that
        cannot be started at all is listed as EXITED."""
        if worker.name in self._children:
            return
        seen = ObservedWorker(
            worker.name,
            worker.role,
            uid=uuid.uuid4().hex,
            phase=WorkerPhase.STARTING,
            started_at=self.now(),
            gpus=worker.gpus,
        )
        child = self._children[worker.name] = _Child(seen)
        self._change.set()
        try:
            child.process = await self._spawn(worker)
            with suppress(psutil.NoSuchProcess):  # over already, and reaped
                child.tree = psutil.Process(child.process.pid)
        except OSError as error:
            with suppress(OSError):  # it may be the disk that refuses
                self._log_path(worker.name).write_text(f"cannot start {worker.argv[0]}: {error}\n")
            self._exited(child, CANNOT_START)
            return
        self._update(child, phase=WorkerPhase.RUNNING)
        child.waiter = asyncio.create_task(self._wait(child, child.process), name=f"wait for {worker.name}")

    async def stop(self, name: str, grace_s: float) -> None:
        """Asks the worker to end, returns at once, and ends it by force `grace_s` later. A repeat may shorten the
        grace, never lengthen it."""
        child = self._living(name)
        if child is None:
            return
        first = child.seen.phase is not WorkerPhase.STOPPING
        due = asyncio.get_running_loop().time() + grace_s
        if first:
            self._update(child, phase=WorkerPhase.STOPPING)
            if child.process is not None and child.process.returncode is None:
                child.process.send_signal(signal.SIGTERM)
        if child.force is None or due < child.force.when():
            if child.force is not None:
                child.force.cancel()
            child.force = asyncio.get_running_loop().call_at(due, _signal_group, child, signal.SIGKILL)

    async def kill(self, name: str) -> None:
        """Ends the worker and all its children by force, now."""
        child = self._living(name)
        if child is None:
            return
        _signal_group(child, signal.SIGKILL)
        if child.waiter is not None:
            await asyncio.wait({child.waiter}, timeout=KILL_WAIT_S)

    async def reclaim(self, name: str, notice_s: float) -> None:
        """Gives the worker a notice, as a preemption does, and takes it away `notice_s` later; 0 gives no notice. The
        worker is reported with its Reclaim at once."""
        child = self._living(name)
        if child is None:
            return
        self._update(child, reclaim=Reclaim(self.now() + notice_s))
        await (self.stop(name, notice_s) if notice_s > 0 else self.kill(name))

    def signal(self, name: str, part: Part, number: int) -> int:
        """Signals a part of a worker; 0 as `number` only counts. Returns how many processes there are; 0 also when the
        worker is gone or was never there."""
        child = self._living(name)
        signalled = 0
        for process in [] if child is None else _members(child, part):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                signalled += 1
        return signalled

    async def changed(self, deadline_s: float) -> bool:
        """Waits until something differs from what the last `list` returned, at most `deadline_s` s; True when so."""
        try:
            await asyncio.wait_for(self._change.wait(), timeout=deadline_s)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Ends by force whatever is left, and returns when it is gone."""
        await asyncio.gather(*(self.kill(name) for name in self._children))

    async def _spawn(self, worker: Worker) -> asyncio.subprocess.Process | Forked:
        prints = self._logs / PRINTS if worker.role is Role.TRAINER else self._log_path(worker.name)
        environment = process_environment(worker.env, worker.inherits)
        with self._log_path(worker.name).open("ab") as log, prints.open("ab") as out:
            if self._forks is not None and self._forks.takes(worker.argv, environment):
                streams = OutputFiles(out.fileno(), log.fileno())
                forked = await self._forks.fork_beside(
                    worker.argv, environment, streams, own_session=True, starts_others=True, umask=OTHERS_NOTHING
                )
                if forked is not None:
                    return forked
            return await asyncio.create_subprocess_exec(
                *worker.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env=environment,
                start_new_session=True,
                umask=OTHERS_NOTHING,
            )

    async def _wait(self, child: _Child, process: asyncio.subprocess.Process | Forked) -> None:
        exit_code = await (process.ended() if isinstance(process, Forked) else process.wait())
        # What it started must not outlive it; its group's number stays taken as long as any member lives.
        _signal_group(child, signal.SIGKILL)
        await _session_gone(process.pid)
        self._exited(child, exit_code)

    def _exited(self, child: _Child, exit_code: int) -> None:
        if child.force is not None:
            child.force.cancel()
        self._update(child, phase=WorkerPhase.EXITED, exit_code=exit_code, exited_at=self.now())

    def _living(self, name: str) -> _Child | None:
        child = self._children.get(name)
        return child if child is not None and child.seen.lives and child.process is not None else None

    def _update(self, child: _Child, **facts: object) -> None:
        child.seen = replace(child.seen, **facts)  # type: ignore[arg-type]
        self._change.set()

    def _log_path(self, name: str) -> Path:
        return self._logs / f"{name}.log"


def _members(child: _Child, part: Part) -> list[psutil.Process]:
    """The worker first, so that it cannot see what happens to the others before it happens to itself."""
    if child.tree is None:
        return []
    try:
        below = [] if part is Part.WORKER else child.tree.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return below if part is Part.BELOW else [child.tree, *below]


async def _session_gone(leader: int) -> None:
    """Returns when nothing lives any more of what a worker started, for its GPU's memory is taken until then. Orphans
    report their end to nobody, hence the polling."""
    with suppress(TimeoutError):
        async with asyncio.timeout(KILL_WAIT_S):
            while _lives_in(leader):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(ORPHANS_POLL_S)


def _lives_in(leader: int) -> bool:
    for process in psutil.process_iter():
        # A zombie holds nothing; where nobody reaps orphans it stays for ever.
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _signal_group(child: _Child, number: int) -> None:
    """Signals everything in the worker's session; a group that is gone is fine."""
    if child.process is not None:
        with suppress(ProcessLookupError):
            os.killpg(child.process.pid, number)
