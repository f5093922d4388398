"""How long an engine may say nothing: the one deadline of all token streams.

A request may wait long for its turn, so what counts is not its own silence but the engine's: a consumer waits on as
long as the engine shows life to anyone. Read next: `streams`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from polyrl_rollout.engines.port import EngineFailed

SILENCE_DEADLINE_S: Final = 60.0
"""An engine with work that produces nothing for anyone for this long hangs: a forward pass takes seconds at most."""

T = TypeVar("T")


class Silence:
    """When the engine was last heard."""

    def __init__(self, now: Callable[[], float], deadline_s: float = SILENCE_DEADLINE_S) -> None:
        self._now = now
        self._deadline_s = deadline_s
        self._heard = now()

    def broken(self) -> None:
        """The engine was heard, or is asked for something after it had nothing to do."""
        self._heard = self._now()

    async def wait(self, receive: Callable[[], Awaitable[T]], awaited: str) -> T:
        """What `receive` gives; called again while others are served. Raises EngineFailed when the engine is silent."""
        while True:
            left = self._heard + self._deadline_s - self._now()
            try:
                async with asyncio.timeout(max(0.0, left)):
                    return await receive()
            except TimeoutError:
                if self._now() - self._heard < self._deadline_s:
                    continue
                raise EngineFailed(f"no {awaited}, nor anything else, for {self._deadline_s:g} s") from None
