"""A rank that lives and does nothing is noticed outside of collectives, which would wait for it for half an hour.

Each rank has a thread that counts up its own number in the group's store and looks at the others': the leader at all,
the others at the leader's. A killed rank shows at once elsewhere: its parent sees its end, its peers' sockets close.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from polyrl_trainer.backends.fsdp.ranks import LEADER, RankPlace

COUNT_S: Final = 1.0
SILENT_S: Final = 60.0
"""Gut feeling: a kernel that is compiled, a folder on a slow disk or a machine that swaps hold a process for tens of
seconds, seldom a minute."""


@dataclass
class LastCounts:
    """When each rank was last heard to count; `now` in seconds of any clock."""

    ranks: list[int]
    began: float
    silent_s: float = SILENT_S
    _seen: dict[int, tuple[bytes, float]] = field(default_factory=dict)

    def note(self, rank: int, count: bytes, now: float) -> None:
        """The same count again is silence."""
        known = self._seen.get(rank)
        if known is None or known[0] != count:
            self._seen[rank] = (count, now)

    def silent(self, now: float) -> int | None:
        """The first rank that was silent for too long."""
        return next((rank for rank in self.ranks if now - self._last(rank) > self.silent_s), None)

    def _last(self, rank: int) -> float:
        return self._seen[rank][1] if rank in self._seen else self.began


class RankHeartbeat:
    """Beats and listens until closed; calls `lost` once, on its own thread, with a sentence."""

    def __init__(self, place: RankPlace, lost: Callable[[str], None], silent_s: float = SILENT_S) -> None:
        self._place, self._lost = place, lost
        others = [rank for rank in range(place.ranks) if rank != place.rank]
        self._watched = others if place.rank == LEADER else [LEADER]
        self._silent_s = silent_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No silence is reported any more."""
        self._closed.set()

    def _run(self) -> None:
        counts = LastCounts(self._watched, time.monotonic(), silent_s=self._silent_s)
        try:
            # A connection of its own: collectives of other threads wait on theirs.
            store = dist.TCPStore(  # type: ignore[attr-defined]
                self._place.address,
                self._place.port,
                is_master=False,
                timeout=timedelta(seconds=self._silent_s),
                wait_for_workers=False,
            )
            count = 0
            while not self._closed.wait(COUNT_S):
                count += 1
                store.set(_key(self._place.rank), str(count))
                now = time.monotonic()
                for rank in self._watched:
                    if store.check([_key(rank)]):
                        counts.note(rank, store.get(_key(rank)), now)
                if (silent := counts.silent(now)) is not None:
                    self._report(f"rank {silent} of the learner was silent for {self._silent_s:g} s")
                    return
        except RuntimeError as error:
            # The leader holds the store.
            self._report(f"rank {LEADER} of the learner is not reached any more: {str(error).splitlines()[0]}")

    def _report(self, reason: str) -> None:
        if not self._closed.is_set():
            self._lost(reason)


def _key(rank: int) -> str:
    return f"beat/{rank}"
