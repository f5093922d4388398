"""One thread that does a backend's work in order, so that the caller's event loop stays live.

Calls run in the order in which they were submitted; a future holds each one's result or error.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

from polyrl.errors import DeadlineExceeded

P = ParamSpec("P")
R = TypeVar("R")


class Background:
    """A queue and its thread."""

    def __init__(self, name: str, threads: int, wait_seconds: float) -> None:
        # The number of compute threads belongs to the calling thread in OpenMP, so it is set in the worker itself.
        self._pool = ThreadPoolExecutor(1, name, initializer=torch.set_num_threads, initargs=(threads,))
        self._name = name
        self._wait_seconds = wait_seconds

    def submit(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Queues `work`; its error is the future's."""
        return self._pool.submit(work, *args, **kwargs)

    def wait_for(self, awaited: str, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Queues `work` and waits for it. Raises DeadlineExceeded naming `awaited`, and whatever `work` raises."""
        future = self.submit(work, *args, **kwargs)
        try:
            return future.result(self._wait_seconds)
        except TimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise DeadlineExceeded(awaited, self._name, self._wait_seconds) from error

    def close(self) -> None:
        """Drops what has not begun; the thread ends after what it is doing."""
        self._pool.shutdown(wait=False, cancel_futures=True)
