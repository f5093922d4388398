"""The token streams of one engine, and how long it may be silent: the one deadline of all of them.

A request may wait long for its turn, so what counts is not its own silence but the engine's: a consumer waits on as
long as the engine sends something to anyone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from polyrl_rollout.engines.port import EngineFailed, TokenChunk

SILENCE_DEADLINE_S: Final = 60.0
"""An engine with work that produces nothing for anyone for this long hangs: a forward pass takes seconds at most."""
T = TypeVar("T")


class SilenceDeadline:
    """Watches how long the engine has produced nothing."""

    def __init__(self, now: Callable[[], float], deadline_s: float = SILENCE_DEADLINE_S) -> None:
        self._now = now
        self._deadline_s = deadline_s
        self._last_output_at = now()
        self._suspended = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Requests rest over a load of weights, which has a deadline of its own; silence does not count."""
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False
            self.reset()

    def reset(self) -> None:
        """The engine produced something, or gets its first request after it had nothing to do."""
        self._last_output_at = self._now()

    async def wait(self, receive: Callable[[], Awaitable[T]], awaited: str) -> T:
        """What `receive` gives; called again while others are served. Raises EngineFailed when the engine is silent."""
        while True:
            left = self._deadline_s if self._suspended else self._last_output_at + self._deadline_s - self._now()
            try:
                async with asyncio.timeout(max(0.0, left)):
                    return await receive()
            except TimeoutError:
                if self._suspended or self._now() - self._last_output_at < self._deadline_s:
                    continue
                raise EngineFailed(f"no {awaited}, nor anything else, for {self._deadline_s:g} s") from None


class Streams:
    """Open streams by rid; an ended one is forgotten, and late chunks for it are dropped."""

    def __init__(self, silence: SilenceDeadline) -> None:
        self._silence = silence
        self._open: dict[str, asyncio.Queue[TokenChunk | EngineFailed | None]] = {}

    def open(self, rid: str) -> None:
        """Makes room for chunks of `rid`, before the engine gets the request. Raises ValueError for a running one."""
        if rid in self._open:
            raise ValueError(f"request {rid} is already running")
        if not self._open:
            self._silence.reset()
        self._open[rid] = asyncio.Queue()

    def deliver(self, rid: str, chunk: TokenChunk) -> None:
        """Hands a chunk to its consumer."""
        self._silence.reset()
        if queue := self._open.get(rid):
            queue.put_nowait(chunk)

    def end(self, rid: str) -> None:
        """Ends a stream without a finish; an unknown rid is fine."""
        if queue := self._open.pop(rid, None):
            queue.put_nowait(None)

    def end_all(self) -> None:
        """Ends every stream without a finish."""
        for rid in tuple(self._open):
            self.end(rid)

    def fail_all(self, reason: str) -> None:
        """Raises EngineFailed in every consumer."""
        for queue in self._open.values():
            queue.put_nowait(EngineFailed(reason))
        self._open.clear()

    async def chunks(self, rid: str) -> AsyncIterator[TokenChunk]:
        """What was delivered to `rid`, until a finish or `end`. Raises EngineFailed."""
        queue = self._open[rid]
        try:
            while True:
                item = await self._silence.wait(queue.get, f"token of {rid}")
                if isinstance(item, EngineFailed):
                    raise item
                if item is None:
                    return
                yield item
                if item.finish is not None:
                    return
        finally:
            if self._open.get(rid) is queue:
                del self._open[rid]
