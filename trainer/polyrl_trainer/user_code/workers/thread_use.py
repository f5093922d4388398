"""Whose coroutine holds a process's main thread now, and since when, in memory that another process reads too.

Coroutines share a thread, so one that blocks stops all. Who it is cannot be asked of the process that is blocked: it is
written down before each step of a coroutine instead, for every task that a conversation, or a call, starts.
"""

from __future__ import annotations

import asyncio
import signal
import struct
import time
from collections import Counter
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any, Final

_LAYOUT: Final = struct.Struct("d56p")
"""Monotonic seconds, which all processes of a machine share; the holder's name."""
SHARED_BYTES: Final = _LAYOUT.size
NOBODY: Final = ""
_MINE: ContextVar[str] = ContextVar("conversation", default=NOBODY)
"""Inherited by the tasks that a conversation or a call starts."""
_TIMERS: Final = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


def disarm() -> None:
    """Ends what alarms were set: a process has one timer, whose signal would hit whoever holds the thread by then, or
    end the process."""
    for timer in _TIMERS:
        signal.setitimer(timer, 0)


@dataclass(eq=False)
class ThreadUse:
    """Who holds the main thread of one process."""

    memory: mmap | bytearray = field(default_factory=lambda: bytearray(SHARED_BYTES))
    _seconds: Counter[str] = field(default_factory=Counter)

    def read(self) -> tuple[str, float]:
        """Who holds the thread, and since when; `NOBODY`: when the loop was last seen to turn."""
        since, name = _LAYOUT.unpack(self.memory[:SHARED_BYTES])
        return name.decode(errors="replace"), since

    def write(self, name: str = NOBODY) -> None:
        """Notes that `name` holds the thread from now on."""
        _LAYOUT.pack_into(self.memory, 0, time.monotonic(), name.encode())

    def seconds_of_others(self, name: str) -> float:
        """How long the thread was held by others than `name`, so far."""
        return float(self._seconds.total() - self._seconds[name])

    def forget(self, name: str) -> None:
        """`name` is over. What it took is still counted, as nobody's."""
        self._seconds[NOBODY] += self._seconds.pop(name, 0)

    def start(self, name: str, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose steps, and those of the tasks that it starts, are written down as the name's."""
        token = _MINE.set(name)
        try:
            return self._task(name, coroutine)
        finally:
            _MINE.reset(token)

    async def call(self, name: str, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """What it returns; its steps are the name's, as those of what the running task starts from now on."""
        _MINE.set(name)
        try:
            return await _Steps(self, name, coroutine=coroutine)
        finally:
            self.forget(name)

    def task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **named: Any) -> asyncio.Task[Any]:
        """A task factory: what a conversation or a call starts besides is its own too."""
        name = _MINE.get()
        return self._task(name, coroutine, **named) if name else asyncio.Task(coroutine, loop=loop, **named)

    def _task(self, name: str, coroutine: Coroutine[Any, Any, Any], **named: Any) -> asyncio.Task[Any]:
        async def stepped() -> Any:
            return await _Steps(self, name, coroutine=coroutine)

        task = asyncio.Task(stepped(), **named)
        task.add_done_callback(lambda _: coroutine.close())  # cancelled before its first step, it was never awaited
        return task

    def _held(self, name: str) -> None:
        since = self.read()[1]
        self.write()
        self._seconds[name] += time.monotonic() - since  # type: ignore[assignment] # of seconds


@dataclass(frozen=True, eq=False)
class _Steps:
    """Drives a coroutine as `await` does. An alarm lasts for the step that sets it."""

    use: ThreadUse
    name: str
    coroutine: Coroutine[Any, Any, Any]

    def __await__(self) -> Generator[Any, Any, Any]:
        sent, raised = None, None
        while True:
            self.use.write(self.name)
            try:
                waits_for = self.coroutine.throw(raised) if raised is not None else self.coroutine.send(sent)
            except StopIteration as ended:
                return ended.value
            finally:
                disarm()
                self.use._held(self.name)
            try:
                sent, raised = (yield waits_for), None
            except BaseException as error:  # noqa: BLE001 - a cancellation, for the coroutine to see
                sent, raised = None, error
