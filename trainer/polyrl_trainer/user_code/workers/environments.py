"""Conversations with the user's environments, each in one worker of a set from its first turn to its last.

next_move ──Turn──> its worker ──Answer──> text
                       └─one holds the thread for longer than a turn may last─> that one fails, the worker is killed

A worker has one thread for all its conversations, and writes down which of them holds it (see `thread_use`): that one
is at fault when the worker hangs or dies. The others are lost through no fault of theirs (`EpisodeLost`).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final

from polyrl.errors import RunFailed
from polyrl_trainer.sample import Sample
from polyrl_trainer.user_code.episodes import EpisodeFailed, EpisodeLost, Move
from polyrl_trainer.user_code.workers import messages, worker_set
from polyrl_trainer.user_code.workers.messages import Turn
from polyrl_trainer.user_code.workers.process import WorkerDied, WorkerProcess
from polyrl_trainer.user_code.workers.worker_set import WorkerSet

WATCH_S: Final = 0.1
"""Between two readings of what a worker's thread is at; deadlines are seconds."""


@dataclass(eq=False)
class EnvironmentPool(WorkerSet):
    """See `episodes.Conversations`."""

    _names: dict[WorkerProcess, set[str]] = field(default_factory=dict, init=False)
    """Conversations of each worker."""
    _at: dict[str, WorkerProcess] = field(default_factory=dict, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set when a worker has come, or none will."""
    _watching: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def runs(self, name: str) -> bool:
        """Whether its environment is alive, and waits for a turn."""
        return name in self._at and not self._at[name].dead

    async def next_move(self, sample: Sample, *, begins: bool) -> Move:
        """Raises EpisodeFailed, EpisodeLost, and RunFailed when no worker can be had."""
        worker = await self._begin(sample.id) if begins else self._at[sample.id]
        if worker.dead:
            raise EpisodeLost("its worker has ended", at_fault=False)
        try:
            answer = await worker.ask(sample.id, Turn(messages.to_wire(sample), begins=begins))
        except WorkerDied as died:
            raise EpisodeLost(str(died), at_fault=died.at_fault) from died
        (outcome,) = answer.outcomes
        if outcome.reason is not None:
            raise EpisodeFailed(outcome.detail, outcome.reason)
        return Move(outcome.text, outcome.reward or 0.0, truncated=outcome.truncated)

    def end(self, name: str) -> None:
        """The episode is over, or nobody asks for it any more."""
        worker = self._at.pop(name, None)
        if worker is None:
            return
        worker.forget(name)
        self._names.get(worker, set()).discard(name)

    async def _begin(self, name: str) -> WorkerProcess:
        self.end(name)
        while not (free := [one for one in self._names if not one.dead and one.calls < worker_set.CALLS_PER_WORKER]):
            if self.failure:
                raise RunFailed(self.failure)
            self._changed.clear()
            await self._changed.wait()
        worker = self._at[name] = min(free, key=lambda one: len(self._names[one]))
        self._names[worker].add(name)
        worker.calls += 1
        if worker.calls == worker_set.CALLS_PER_WORKER:
            self.add()  # this one ends with its last conversation
        return worker

    def take_in(self, worker: WorkerProcess) -> None:
        """See `WorkerSet`."""
        self._names[worker] = set()
        self._changed.set()
        task = asyncio.create_task(self._watch(worker))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    def give_up(self) -> None:
        """See `WorkerSet`."""
        self._changed.set()

    async def _watch(self, worker: WorkerProcess) -> None:
        retires = False
        before = worker.thread.read()
        while not (worker.dead or (retires and not self._names[worker])):
            await asyncio.sleep(WATCH_S)
            retires = worker.calls >= worker_set.CALLS_PER_WORKER
            holder, since = worker.thread.read()
            # The same twice: the trainer's own loop was not late, and no half of two writes was read.
            if (holder, since) == before and time.monotonic() - since > self.setup.timeout_s:
                self._fail(worker, holder)
            before = holder, since
        del self._names[worker]
        if retires:
            self._living.discard(worker)
            worker.kill()
        else:
            self.replace(worker)

    def _fail(self, worker: WorkerProcess, name: str) -> None:
        future = worker.withdraw(name)
        if future is not None and not future.done():
            future.set_exception(EpisodeFailed(f"no answer within {self.setup.timeout_s:g} s"))
        worker.kill()

    def close(self) -> None:
        """Ends all workers, whatever they do."""
        for task in self._watching:
            task.cancel()
        super().close()
