"""A rank that lives and does nothing is noticed outside of collectives, which would wait for it for half an hour.

The leader has a pair of sockets with each other rank, made before that rank was started and known to nobody else. A
thread of each rank sends a byte every second on those it has, and listens: the leader to all, the others to the leader.
A killed rank shows at once elsewhere: its parent sees its end, its peers' sockets close.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from polyrl_trainer.backends.fsdp.ranks import LEADER

SEND_EVERY_S: Final = 1.0
SILENT_S: Final = 60.0
"""Gut feeling: a kernel that is compiled, a folder on a slow disk or a machine that swaps hold a process for tens of
seconds, seldom a minute."""
LINK: Final = "POLYRL_RANK_HEARTBEAT_FD"
"""The descriptor of a follower's socket."""
READ_BYTES: Final = 4096


def link_to_leader() -> dict[int, socket.socket]:
    """Of a follower. Raises KeyError where it was not given one."""
    return {LEADER: socket.socket(fileno=int(os.environ[LINK]))}


@dataclass
class LastHeard:
    """When each rank was last heard; `now` in seconds of any clock."""

    ranks: list[int]
    began: float
    silent_s: float = SILENT_S
    _heard: dict[int, float] = field(default_factory=dict)

    def note(self, rank: int, now: float) -> None:
        """It was heard."""
        self._heard[rank] = now

    def silent(self, now: float) -> int | None:
        """The first rank that was silent for too long."""
        return next((rank for rank in self.ranks if now - self._heard.get(rank, self.began) > self.silent_s), None)


class RankHeartbeat:
    """Beats and listens until closed; calls `lost` once, on its own thread, with a sentence."""

    def __init__(
        self, links: Mapping[int, socket.socket], lost: Callable[[str], None], silent_s: float = SILENT_S
    ) -> None:
        """`links`: a socket to each rank that is watched."""
        self._links, self._lost = links, lost
        self._silent_s = silent_s
        for link in links.values():
            link.setblocking(False)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No silence is reported any more."""
        self._closed.set()

    def _run(self) -> None:
        heard = LastHeard([*self._links], time.monotonic(), silent_s=self._silent_s)
        while not self._closed.wait(SEND_EVERY_S):
            now = time.monotonic()
            for rank, link in self._links.items():
                _send(link)
                if _was_heard(link):
                    heard.note(rank, now)
            if (silent := heard.silent(now)) is not None:
                self._report(f"rank {silent} of the learner was silent for {self._silent_s:g} s")
                return

    def _report(self, reason: str) -> None:
        if not self._closed.is_set():
            self._lost(reason)


def _send(link: socket.socket) -> None:
    # A rank that reads nothing, or has ended, is silent as well: that is what is reported, or its end, elsewhere.
    with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
        link.send(b".")


def _was_heard(link: socket.socket) -> bool:
    try:
        return bool(link.recv(READ_BYTES))
    except (BlockingIOError, ConnectionResetError):
        return False
