"""One worker from the trainer's side: spawned, asked, killed with all that it started.

A worker is *spawned*: what is forked from a process with torch and sockets holds their locks and descriptors.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec

from polyrl import parent_death_signal
from polyrl.errors import InvalidCode
from polyrl_trainer.user_code.workers import messages, thread_use
from polyrl_trainer.user_code.workers.messages import Answer, CodeLoaded, Setup
from polyrl_trainer.user_code.workers.strays import started_by
from polyrl_trainer.user_code.workers.thread_use import ThreadUse

LOAD_TIMEOUT_S: Final = 300.0
"""For the imports of the user's code; a verifier with a model of its own may take a minute."""
ONE_THREAD: Final = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
"""The cores belong to the learner, and several workers share what it leaves."""

MARK: Final = "POLYRL_USER_CODE_WORKER"
"""Environment variable by which what a worker started is known when the worker is gone: its children are inherited, and
nothing tells any more whose they were."""


class WorkerDied(Exception):
    """The process ended while it was asked or loaded."""

    def __init__(self, detail: str, *, at_fault: bool = True) -> None:
        """`at_fault`: whoever asked held the process's thread then, or nobody did."""
        super().__init__(detail)
        self.at_fault = at_fault


@dataclass(eq=False)
class WorkerProcess:
    """One process, and what it is asked."""

    process: subprocess.Popen[bytes]
    mark: str
    socket: socket.socket
    thread: ThreadUse
    is_async: bool = False
    calls: int = 0
    """Calls, or conversations, that it was given."""
    dead: bool = False
    _pending: dict[str, asyncio.Future[Answer]] = field(default_factory=dict)
    _writer: asyncio.StreamWriter | None = None
    _listening: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self._pending)

    @classmethod
    def spawn(cls, setup: Setup) -> WorkerProcess:
        """Begins to load the user's code."""
        ours, theirs = socket.socketpair()
        memory = os.memfd_create("thread-use")
        os.ftruncate(memory, thread_use.SHARED_BYTES)
        mark = secrets.token_hex(16)
        environment = {**os.environ, **ONE_THREAD, parent_death_signal.PARENT_PID: str(os.getpid()), MARK: mark}
        process = subprocess.Popen(
            [sys.executable, "-m", "polyrl_trainer.user_code.workers.worker", str(theirs.fileno()), str(memory)],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=[theirs.fileno(), memory],
            # Its own group: what user code starts is killed with it, and Ctrl-C reaches the trainer alone.
            process_group=0,
        )
        theirs.close()
        thread = ThreadUse(mmap.mmap(memory, thread_use.SHARED_BYTES))
        os.close(memory)
        ours.sendall(messages.to_frame(setup))
        return cls(process, mark, socket=ours, thread=thread)

    async def load(self) -> None:
        """Raises InvalidCode, WorkerDied."""
        self.socket.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=self.socket)
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                loaded = msgspec.msgpack.decode(await messages.next_body(reader), type=CodeLoaded)
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
                answer = msgspec.msgpack.decode(await messages.next_body(reader), type=Answer)
                future = self._pending.pop(answer.id, None)
                if future is not None and not future.done():
                    future.set_result(answer)
        self.kill()

    def ask(self, name: str, message: msgspec.Struct) -> asyncio.Future[Answer]:
        """Its answer to what has this name; raises WorkerDied when awaited."""
        assert self._writer is not None, "a worker is asked after it has loaded"
        future = self._pending[name] = asyncio.get_running_loop().create_future()
        self._writer.write(messages.to_frame(message))
        return future

    def forget(self, name: str) -> None:
        """Nobody awaits it any more."""
        future = self._pending.pop(name, None)
        if future is not None:
            future.cancel()
        if self._writer is not None and not self.dead:
            self._writer.write(messages.to_frame(messages.Ended(name)))

    def withdraw(self, name: str) -> asyncio.Future[Answer] | None:
        """Its answer counts no more."""
        return self._pending.pop(name, None)

    def kill(self) -> None:
        """At once, with all that it started; what else it was asked raises WorkerDied."""
        if self.dead:
            return
        self.dead = True
        started = started_by(self.process.pid, f"{MARK}={self.mark}")
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in started:  # a sandbox's, in a group or session of its own
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if self._writer is not None:
            self._writer.close()
        else:
            self.socket.close()
        holder, _ = self.thread.read()
        for name, future in self._pending.items():
            if not future.done():
                at_fault = holder in (name, thread_use.NOBODY)
                detail = f"its worker ended ({_ending(self.process.returncode)})"
                future.set_exception(WorkerDied(detail, at_fault=at_fault))
        self._pending.clear()
        if self._listening is not None:
            self._listening.cancel()


def _ending(code: int) -> str:
    return f"exit {code}" if code >= 0 else signal.Signals(-code).name
