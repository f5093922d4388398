"""The port to whatever runs a local run's workers, and what it reports of them.

A fleet starts and ends single workers and reports what it sees; the planner decides. All times are seconds on the
fleet's own monotonic clock. One contract suite holds every implementation to the docstrings below.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from polyrl.worker import Role, Worker


class WorkerPhase(StrEnum):
    """Where a worker is in its life. A worker never goes back; it may skip a phase."""

    STARTING = "Starting"
    """Requested, not there yet."""
    RUNNING = "Running"
    STOPPING = "Stopping"
    """Asked to end; it has until its grace is over."""
    EXITED = "Exited"


@dataclass(frozen=True)
class Reclaim:
    """The capacity is taken away: after a spot notice, or by a kill without one."""

    deadline: float
    """Fleet time after which the worker is gone."""


@dataclass(frozen=True)
class ObservedWorker:
    """One worker as the fleet sees it."""

    name: str
    role: Role
    uid: str
    """Never reused, unlike a process id."""
    phase: WorkerPhase
    started_at: float
    exit_code: int | None = None
    """Known when EXITED; negative is the signal that ended it."""
    exited_at: float | None = None
    reclaim: Reclaim | None = None
    """Stays set after the exit: an exit that follows a reclaim is no failure."""

    @property
    def lives(self) -> bool:
        """True while a process or pod is, or may be, there."""
        return self.phase is not WorkerPhase.EXITED

    @property
    def counts(self) -> bool:
        """True when it stands for one of the wanted workers: it lives, and is not being ended."""
        return self.phase in (WorkerPhase.STARTING, WorkerPhase.RUNNING) and self.reclaim is None


class Fleet(Protocol):
    """Runs workers. Names are used once: an exited worker stays listed, and its name starts nothing again."""

    def now(self) -> float:
        """Seconds on the clock of every time this fleet reports."""
        ...

    async def list(self) -> list[ObservedWorker]:
        """Every worker ever started, oldest first."""
        ...

    async def start(self, worker: Worker) -> None:
        """Starts `worker`; does nothing when one of its name was started before, so a repeat is harmless.
        A worker that cannot be started at all is listed as EXITED."""
        ...

    async def stop(self, name: str, grace_s: float) -> None:
        """Asks the worker to end, returns at once, and ends it by force `grace_s` later. A worker that is gone or was
        never there is fine. A repeat may shorten the grace, never lengthen it."""
        ...

    async def kill(self, name: str) -> None:
        """Ends the worker and all its children by force, now. A worker that is gone or was never there is fine."""
        ...

    async def changed(self, deadline_s: float) -> bool:
        """Waits until something differs from what the last `list` returned, at most `deadline_s` s; True when so."""
        ...


class SpotMarket(Protocol):
    """What a fleet that can play the spot market adds, for injected faults."""

    async def reclaim(self, name: str, notice_s: float) -> None:
        """Gives the worker a notice, as a preemption does, and takes it away `notice_s` later; 0 gives no notice. The
        worker is reported with its Reclaim at once. A worker that is gone is fine."""
        ...
