"""The running requests of one engine: chunks in from its one reader, chunks out to one consumer per request.

Refuses to hold: where chunks come from. Read next: `embedded`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from polyrl_rollout.engines.port import EngineFailed, TokenChunk
from polyrl_rollout.engines.silence import Silence


class Streams:
    """Open streams by rid; an ended one is forgotten, and late chunks for it are dropped."""

    def __init__(self, silence: Silence) -> None:
        self._silence = silence
        self._open: dict[str, asyncio.Queue[TokenChunk | EngineFailed | None]] = {}

    def open(self, rid: str) -> None:
        """Makes room for chunks of `rid`, before the engine hears of it. Raises ValueError for a running one."""
        if rid in self._open:
            raise ValueError(f"request {rid} is already running")
        if not self._open:
            self._silence.broken()
        self._open[rid] = asyncio.Queue()

    def deliver(self, rid: str, chunk: TokenChunk) -> None:
        """Hands a chunk to its consumer."""
        self._silence.broken()
        if queue := self._open.get(rid):
            queue.put_nowait(chunk)

    def end(self, rid: str) -> None:
        """Ends a stream without a finish; an unknown rid is fine."""
        if queue := self._open.pop(rid, None):
            queue.put_nowait(None)

    def end_all(self) -> list[str]:
        """Ends every stream without a finish, and names them."""
        rids = list(self._open)
        for rid in rids:
            self.end(rid)
        return rids

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
