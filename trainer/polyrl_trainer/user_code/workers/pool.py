"""Calls of one function of the user's, each at a worker of a set.

call ──waits──> a worker's slot ──Call──> worker ──Answer──> verdict
                                   └─deadline or death─> killed with all that it started, and another one is spawned

A sync function has its worker for itself, and its deadline runs from then on; an async one shares its worker with
others, and is cancelled in it at its deadline. What dies through no fault of its own (a neighbour blocked, somebody
killed the worker) is called once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from polyrl.errors import RunFailed
from polyrl.sample import DiscardReason
from polyrl_trainer.sample import Sample
from polyrl_trainer.user_code.rewards import CallTimedOut
from polyrl_trainer.user_code.verdicts import Reward, Unscored, Verdict
from polyrl_trainer.user_code.workers import messages, worker_set
from polyrl_trainer.user_code.workers.messages import Call, Outcome
from polyrl_trainer.user_code.workers.process import WorkerDied, WorkerProcess
from polyrl_trainer.user_code.workers.worker_set import WorkerSet

SETTLE_S: Final = 0.2
"""After a deadline, for an answer that lies in the socket because the trainer's own loop was busy."""
CANCEL_S: Final = 1.0
"""In which an async call must end after its deadline; beyond it a call has blocked its loop."""
CALL_ATTEMPTS: Final = 2
"""Calls of one sample, when its worker dies under it."""


@dataclass(eq=False)
class WorkerPool(WorkerSet):
    """Workers of one function."""

    concurrency: int
    """Calls of an async function at once, over all workers."""
    _slots: asyncio.Queue[WorkerProcess | None] = field(default_factory=asyncio.Queue, init=False)
    """A worker once for each call that it may take now; None when no worker can be had any more."""

    async def call(self, samples: Sequence[Sample], timeout_s: float) -> Sequence[Verdict | None]:
        """See `rewards.Calls`."""
        died = ""
        for _ in range(CALL_ATTEMPTS):
            worker = await self._free_worker()
            try:
                return [_verdict(one) for one in await _ask(worker, samples, timeout_s)]
            except WorkerDied as error:
                died = str(error)
            finally:
                self._put_back(worker)
        dead = Unscored(DiscardReason.REWARD_RAISED, f"{self.setup.function}: {died}, {CALL_ATTEMPTS} times")
        return [dead] * len(samples)

    async def _free_worker(self) -> WorkerProcess:
        while (worker := await self._slots.get()) is not None:
            if not worker.dead and worker.calls < worker_set.CALLS_PER_WORKER:
                return worker
        self._slots.put_nowait(None)
        raise RunFailed(self.failure)

    def _put_back(self, worker: WorkerProcess) -> None:
        if not worker.dead and worker.calls < worker_set.CALLS_PER_WORKER:
            self._slots.put_nowait(worker)
        elif worker.dead or not worker.is_busy:  # its last call retires it
            self.replace(worker)

    def take_in(self, worker: WorkerProcess) -> None:
        """See `WorkerSet`."""
        for _ in range(self._calls_of(worker)):
            self._slots.put_nowait(worker)

    def _calls_of(self, worker: WorkerProcess) -> int:
        return max(1, self.concurrency // self.workers) if worker.is_async else 1

    @property
    def at_once(self) -> int:
        """Calls that all workers take, once they are ready."""
        return sum(map(self._calls_of, self._living))

    def give_up(self) -> None:
        """See `WorkerSet`."""
        self._slots.put_nowait(None)


async def _ask(worker: WorkerProcess, samples: Sequence[Sample], timeout_s: float) -> tuple[Outcome, ...]:
    """Raises CallTimedOut, WorkerDied."""
    worker.calls += 1
    name = str(worker.calls)
    call = Call(name, tuple(messages.to_wire(one) for one in samples), timeout_s=timeout_s)
    future = worker.ask(name, call)
    try:
        await asyncio.wait({future}, timeout=timeout_s + (CANCEL_S if worker.is_async else 0.0))
        if not future.done():
            await asyncio.wait({future}, timeout=SETTLE_S)
    except BaseException:
        worker.withdraw(name)  # nobody awaits it any more
        worker.kill()
        raise
    if not future.done():
        worker.withdraw(name)
        worker.kill()
        raise CallTimedOut
    return future.result().outcomes


def _verdict(outcome: Outcome) -> Verdict | None:
    if outcome.reason is DiscardReason.REWARD_TIMED_OUT:
        raise CallTimedOut
    if outcome.reason is not None:
        return Unscored(outcome.reason, outcome.detail)
    return None if outcome.reward is None else Reward(outcome.reward, outcome.metrics)
