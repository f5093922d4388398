"""Worker processes for one function of the user's: warm, replaced when they hang, die or have served long enough.

call ──waits──> a worker's slot ──Call──> worker ──Answer──> verdict
                                   └─deadline or death─> killed with all that it started, and another one is spawned

A sync function has its worker for itself, and its deadline runs from then on; an async one shares its worker with
others, and is cancelled in it at its deadline. What dies through no fault of its own (a neighbour blocked, somebody
killed the worker) is called once more. A worker is *spawned*: what is forked from a process with torch and sockets
holds their locks and descriptors.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec
import structlog

from polyrl import parent_death_signal
from polyrl.errors import InvalidCode, RunFailed
from polyrl.sample import DiscardReason
from polyrl_trainer.sample import Sample
from polyrl_trainer.user_code import messages
from polyrl_trainer.user_code.messages import Answer, Call, CodeLoaded, Setup
from polyrl_trainer.user_code.rewards import CallTimedOut
from polyrl_trainer.user_code.verdicts import Reward, Unscored, Verdict

log = structlog.get_logger()

CALLS_PER_WORKER: Final = 10_000
"""After which a worker is replaced: what its code leaks has an end. A gut feeling."""
SETTLE_S: Final = 0.2
"""After a deadline, for an answer that lies in the socket because the trainer's own loop was busy."""
CANCEL_S: Final = 1.0
"""In which an async call must end after its deadline; beyond it a call has blocked its loop."""
LOAD_TIMEOUT_S: Final = 300.0
"""For the imports of the user's code; a verifier with a model of its own may take a minute."""
MAX_FAILED_LOADS: Final = 3
"""Replacements in a row that did not start, after which the run fails."""
CALL_ATTEMPTS: Final = 2
"""Calls of one sample, when its worker dies under it."""
ONE_THREAD: Final = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
"""The cores belong to the learner, and several workers share what it leaves."""


class WorkerDied(Exception):
    """The process ended while it was called or loaded."""


def default_workers() -> int:
    """Half of the cores: the learner's threads have the other half."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


@dataclass(eq=False)
class WorkerProcess:
    """One process, and the calls that it is at."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    is_async: bool = False
    calls: int = 0
    dead: bool = False
    _pending: dict[int, asyncio.Future[Answer]] = field(default_factory=dict)
    _writer: asyncio.StreamWriter | None = None
    _listening: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self._pending)

    @classmethod
    def spawn(cls, setup: Setup) -> WorkerProcess:
        """Begins to load the user's code."""
        ours, theirs = socket.socketpair()
        environment = {**os.environ, **ONE_THREAD, parent_death_signal.PARENT_PID: str(os.getpid())}
        process = subprocess.Popen(
            [sys.executable, "-m", "polyrl_trainer.user_code.worker", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=[theirs.fileno()],
            # Its own group: what user code starts is killed with it, and Ctrl-C reaches the trainer alone.
            process_group=0,
        )
        theirs.close()
        ours.sendall(messages.to_frame(setup))
        return cls(process, ours)

    async def load(self) -> None:
        """Raises InvalidCode, WorkerDied."""
        self.socket.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=self.socket)
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                loaded = msgspec.msgpack.decode(await _next_body(reader), type=CodeLoaded)
        except (OSError, EOFError, ValueError, TimeoutError, msgspec.MsgspecError) as error:
            raise WorkerDied(f"it ended or hung while it was imported ({type(error).__name__})") from error
        if loaded.invalid:
            raise InvalidCode(loaded.invalid)
        self.is_async = loaded.is_async
        self._listening = asyncio.create_task(self._listen(reader))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        # What comes is not trusted: user code may have written it.
        with suppress(OSError, EOFError, ValueError, msgspec.MsgspecError):
            while True:
                answer = msgspec.msgpack.decode(await _next_body(reader), type=Answer)
                future = self._pending.pop(answer.id, None)
                if future is not None and not future.done():
                    future.set_result(answer)
        self.kill()

    async def call(self, samples: Sequence[Sample], timeout_s: float) -> Answer:
        """Raises CallTimedOut, WorkerDied."""
        assert self._writer is not None, "a worker is called after it has loaded"
        self.calls += 1
        number = self.calls
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            self._writer.write(
                messages.to_frame(Call(number, tuple(messages.to_wire(one) for one in samples), timeout_s=timeout_s))
            )
            await asyncio.wait({future}, timeout=timeout_s + (CANCEL_S if self.is_async else 0.0))
            if not future.done():
                await asyncio.wait({future}, timeout=SETTLE_S)
        except BaseException:
            self._pending.pop(number, None)  # nobody awaits it any more
            self.kill()
            raise
        if not future.done():
            del self._pending[number]
            self.kill()
            raise CallTimedOut
        return future.result()

    def kill(self) -> None:
        """At once, with all that it started; its other calls raise WorkerDied."""
        if self.dead:
            return
        self.dead = True
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self._writer is not None:
            self._writer.close()
        else:
            self.socket.close()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(WorkerDied(f"its worker ended ({_ending(self.process.returncode)})"))
        self._pending.clear()
        if self._listening is not None:
            self._listening.cancel()


@dataclass(eq=False)
class WorkerPool:
    """Workers of one function."""

    setup: Setup
    workers: int
    concurrency: int
    """Calls of an async function at once, over all workers."""
    _living: set[WorkerProcess] = field(default_factory=set)
    _slots: asyncio.Queue[WorkerProcess | None] = field(default_factory=asyncio.Queue)
    """A worker once for each call that it may take now; None when no worker can be had any more."""
    _loading: set[asyncio.Task[None]] = field(default_factory=set)
    _failure: str = ""
    _failed_loads: int = 0

    def start(self) -> None:
        """Spawns all workers, which load while the caller goes on with other things."""
        self._living.update(WorkerProcess.spawn(self.setup) for _ in range(self.workers))

    async def ready(self) -> None:
        """When the user's code is imported by all. Raises InvalidCode."""
        try:
            await asyncio.gather(*(self._take_in(worker) for worker in self._living))
        except WorkerDied as error:
            raise InvalidCode(f"{self.setup.function}: {error}") from error

    async def call(self, samples: Sequence[Sample], timeout_s: float) -> Verdict | None:
        """See `rewards.Calls`."""
        died = ""
        for _ in range(CALL_ATTEMPTS):
            worker = await self._free_worker()
            try:
                return _verdict(await worker.call(samples, timeout_s))
            except WorkerDied as error:
                died = str(error)
            finally:
                self._put_back(worker)
        return Unscored(DiscardReason.REWARD_RAISED, f"{self.setup.function}: {died}, {CALL_ATTEMPTS} times")

    async def _free_worker(self) -> WorkerProcess:
        while (worker := await self._slots.get()) is not None:
            if not worker.dead and worker.calls < CALLS_PER_WORKER:
                return worker
        self._slots.put_nowait(None)
        raise RunFailed(self._failure)

    def _put_back(self, worker: WorkerProcess) -> None:
        if not worker.dead and worker.calls < CALLS_PER_WORKER:
            self._slots.put_nowait(worker)
            return
        if not worker.dead and worker.is_busy:
            return  # its last call retires it
        worker.kill()
        if worker in self._living:
            self._living.discard(worker)
            self._replace()

    def _replace(self) -> None:
        worker = WorkerProcess.spawn(self.setup)
        self._living.add(worker)
        task = asyncio.create_task(self._load_again(worker))
        self._loading.add(task)
        task.add_done_callback(self._loading.discard)

    async def _load_again(self, worker: WorkerProcess) -> None:
        try:
            await self._take_in(worker)
            self._failed_loads = 0
        except (WorkerDied, InvalidCode) as error:
            self._living.discard(worker)
            self._failed_loads += 1
            if self._failed_loads < MAX_FAILED_LOADS:
                self._replace()
            else:
                self._failure = f"{self.setup.function}: no worker can be started any more: {error}"
                self._slots.put_nowait(None)

    async def _take_in(self, worker: WorkerProcess) -> None:
        try:
            await worker.load()
        except BaseException:
            worker.kill()
            raise
        slots = max(1, self.concurrency // self.workers) if worker.is_async else 1
        for _ in range(slots):
            self._slots.put_nowait(worker)

    def close(self) -> None:
        """Ends all workers, whatever they do."""
        for task in self._loading:
            task.cancel()
        for worker in self._living:
            worker.kill()
        self._living.clear()


def _verdict(answer: Answer) -> Verdict | None:
    if answer.reason is DiscardReason.REWARD_TIMED_OUT:
        raise CallTimedOut
    if answer.reason is not None:
        return Unscored(answer.reason, answer.detail)
    return None if answer.reward is None else Reward(answer.reward, answer.metrics)


async def _next_body(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(messages.body_length(await reader.readexactly(messages.HEADER_BYTES)))


def _ending(code: int) -> str:
    return f"exit {code}" if code >= 0 else signal.Signals(-code).name
