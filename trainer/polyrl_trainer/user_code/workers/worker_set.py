"""So many workers of one function: spawned at the start, replaced when they end, until replacements do not start."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Final

from polyrl.errors import InvalidCode
from polyrl_trainer.user_code.workers.messages import Setup
from polyrl_trainer.user_code.workers.process import WorkerDied, WorkerProcess

CALLS_PER_WORKER: Final = 10_000
"""After which a worker is replaced: what its code leaks has an end. A gut feeling."""
MAX_FAILED_LOADS: Final = 3
"""Replacements in a row that did not start, after which the run fails."""


def default_workers() -> int:
    """Half of the cores: the learner's threads have the other half."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


@dataclass(eq=False)
class WorkerSet(ABC):
    """Workers that were spawned and have not ended."""

    setup: Setup
    workers: int
    failure: str = field(default="", init=False)
    """Why no worker can be had any more."""
    _living: set[WorkerProcess] = field(default_factory=set, init=False)
    _loading: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _failed_loads: int = field(default=0, init=False)

    @abstractmethod
    def take_in(self, worker: WorkerProcess) -> None:
        """The worker has imported the user's code."""

    @abstractmethod
    def give_up(self) -> None:
        """No worker can be had any more."""

    def start(self) -> None:
        """Spawns all, which load while the caller goes on with other things."""
        self._living.update(WorkerProcess.spawn(self.setup) for _ in range(self.workers))

    async def ready(self) -> None:
        """When the user's code is imported by all. Raises InvalidCode."""
        try:
            await asyncio.gather(*(self._load(worker) for worker in self._living))
        except WorkerDied as error:
            raise InvalidCode(f"{self.setup.function}: {error}") from error

    def replace(self, worker: WorkerProcess) -> None:
        """By another one, once."""
        worker.kill()
        if worker in self._living:
            self._living.discard(worker)
            self.add()

    def add(self) -> None:
        """One more."""
        worker = WorkerProcess.spawn(self.setup)
        self._living.add(worker)
        task = asyncio.create_task(self._load_again(worker))
        self._loading.add(task)
        task.add_done_callback(self._loading.discard)

    async def _load_again(self, worker: WorkerProcess) -> None:
        try:
            await self._load(worker)
            self._failed_loads = 0
        except (WorkerDied, InvalidCode) as error:
            self._living.discard(worker)
            self._failed_loads += 1
            if self._failed_loads < MAX_FAILED_LOADS:
                self.add()
            else:
                self.failure = f"{self.setup.function}: no worker can be started any more: {error}"
                self.give_up()

    async def _load(self, worker: WorkerProcess) -> None:
        try:
            await worker.load()
        except BaseException:
            worker.kill()
            raise
        self.take_in(worker)

    def close(self) -> None:
        """Ends all workers, whatever they do."""
        for task in self._loading:
            task.cancel()
        for worker in self._living:
            worker.kill()
        self._living.clear()
