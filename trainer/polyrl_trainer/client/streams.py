"""What the manager says unasked: finished turns and dropped groups, each handed out once.

Refuses to hold: requests (see `client_requests`). Read next: `client`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final, Generic, TypeVar

from polyrl.wire import GroupDropped, TurnDone

T = TypeVar("T")

_END: Final = object()


class EventStream(Generic[T]):
    """A queue that ends, in order or with an error. The manager's own bounds (open samples) bound it."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[T | object] = asyncio.Queue()
        self._failure: Exception | None = None

    def put(self, item: T) -> None:
        """Adds `item` for whoever iterates."""
        self._queue.put_nowait(item)

    def take_all(self) -> list[T]:
        """Everything that is there now."""
        taken: list[T] = []
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if item is _END:
                self._queue.put_nowait(_END)
                break
            taken.append(item)  # type: ignore[arg-type]
        return taken

    def end(self, failure: Exception | None = None) -> None:
        """Iteration ends after what is queued; with `failure`, by raising it."""
        self._failure = failure
        self._queue.put_nowait(_END)

    async def __aiter__(self) -> AsyncIterator[T]:
        while (item := await self._queue.get()) is not _END:
            yield item  # type: ignore[misc]
        self._queue.put_nowait(_END)
        if self._failure is not None:
            raise self._failure


class TurnStream(EventStream[TurnDone]):
    """The manager repeats a turn until its verdict is accepted; here it is handed out once."""

    def __init__(self) -> None:
        super().__init__()
        self._out: set[tuple[str, int]] = set()

    def hear(self, turn: TurnDone) -> None:
        """Takes a turn from the manager."""
        key = (turn.response.sample, turn.response.turn)
        if key not in self._out:
            self._out.add(key)
            self.put(turn)

    def settle(self, sample: str, turn: int) -> None:
        """The verdict on a turn has arrived."""
        self._out.discard((sample, turn))

    def settle_sample(self, sample: str) -> None:
        """The sample has ended, whatever turn it was in."""
        self._out = {key for key in self._out if key[0] != sample}


class DropStream(EventStream[GroupDropped]):
    """The manager repeats notices with each greeting; each group is handed out once."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[int] = set()

    def hear(self, notice: GroupDropped) -> None:
        """Takes a notice from the manager."""
        if notice.group not in self._known:
            self._known.add(notice.group)
            self.put(notice)
