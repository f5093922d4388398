"""A fleet in virtual time, for tests of the planner; one contract suite holds it and the fleet of processes together.

Nothing runs. Workers take `boot_s` to start and `exit_s` to follow a stop; a test ends one with `crash`. `changed` lets
virtual time pass to the next event, so that a wait costs nothing and every schedule repeats exactly.
"""

from __future__ import annotations

import builtins
from dataclasses import dataclass, replace

from polyrl.local.planner import ObservedWorker, Reclaim, WorkerPhase
from polyrl.worker import Worker

SIGKILL = -9
SIGTERM = -15


@dataclass
class _FakeWorker:
    """One worker's present and its next event, if it has one."""

    seen: ObservedWorker
    due: float | None
    exit_code: int = SIGTERM
    """With what it exits when `due` comes while it is stopping."""


class FakeFleet:
    """Does what `polyrl_cli.local.process_fleet.ProcessFleet` says; `boot_s` and `exit_s` are virtual seconds."""

    def __init__(self, boot_s: float = 1.0, exit_s: float = 0.5) -> None:
        self.boot_s, self.exit_s = boot_s, exit_s
        self.started: builtins.list[Worker] = []
        """What was asked to start, in order; a repeat is not listed."""
        self._lives: dict[str, _FakeWorker] = {}
        self._now = 0.0
        self._dirty = False

    def now(self) -> float:
        return self._now

    async def list(self) -> builtins.list[ObservedWorker]:
        self._dirty = False
        return [life.seen for life in self._lives.values()]

    async def start(self, worker: Worker) -> None:
        if worker.name in self._lives:
            return
        self.started.append(worker)
        seen = ObservedWorker(
            worker.name,
            worker.role,
            uid=f"fake-{len(self._lives)}",
            phase=WorkerPhase.STARTING,
            started_at=self._now,
            gpus=worker.gpus,
        )
        self._lives[worker.name] = _FakeWorker(seen, due=self._now + self.boot_s)
        self._dirty = True

    async def stop(self, name: str, grace_s: float) -> None:
        life = self._lives.get(name)
        if life is None or not life.seen.lives:
            return
        in_time = grace_s >= self.exit_s
        due = self._now + min(self.exit_s, grace_s)
        if life.seen.phase is WorkerPhase.STOPPING and life.due is not None and life.due <= due:
            return
        self._become(life, WorkerPhase.STOPPING)
        life.due, life.exit_code = due, SIGTERM if in_time else SIGKILL

    async def kill(self, name: str) -> None:
        self.crash(name, SIGKILL)

    async def reclaim(self, name: str, notice_s: float) -> None:
        life = self._lives.get(name)
        if life is None or not life.seen.lives:
            return
        life.seen = replace(life.seen, reclaim=Reclaim(self._now + notice_s))
        if notice_s > 0:
            await self.stop(name, notice_s)
        else:
            await self.kill(name)

    async def changed(self, deadline_s: float) -> bool:
        until = self._now + deadline_s
        while not self._dirty:
            due = min((life.due for life in self._lives.values() if life.due is not None), default=None)
            if due is None or due > until:
                self._now = until
                return False
            self._advance(due)
        return True

    def crash(self, name: str, exit_code: int) -> None:
        """The worker ends by itself, now."""
        life = self._lives.get(name)
        if life is not None and life.seen.lives:
            self._exit(life, exit_code)

    def _advance(self, due: float) -> None:
        self._now = max(self._now, due)
        for life in self._lives.values():
            if life.due is None or life.due > self._now:
                continue
            life.due = None
            if life.seen.phase is WorkerPhase.STARTING:
                self._become(life, WorkerPhase.RUNNING)
            else:
                self._exit(life, life.exit_code)

    def _become(self, life: _FakeWorker, phase: WorkerPhase) -> None:
        life.seen = replace(life.seen, phase=phase)
        self._dirty = True

    def _exit(self, life: _FakeWorker, exit_code: int) -> None:
        life.seen = replace(life.seen, phase=WorkerPhase.EXITED, exit_code=exit_code, exited_at=self._now)
        life.due = None
        self._dirty = True
