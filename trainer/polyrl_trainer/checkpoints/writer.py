"""A thread that writes, one piece of work after the other, and holds up no end of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

R = TypeVar("R")


class Writer:
    """A daemon thread: a disk that hangs keeps threads of an executor, and with them Python, from ending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], R]) -> Future[R]:
        """Queues `work`; its error is the future's."""
        future: Future[R] = Future()
        # Whoever stops waiting cancels nothing.
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - the future's
                future.set_exception(error)

        self._queue.put(run)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        return future

    def _work(self) -> None:
        while True:
            self._queue.get()()
