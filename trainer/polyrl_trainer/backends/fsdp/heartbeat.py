"""A rank that lives and does nothing is noticed outside of collectives, which would wait for it for half an hour.

One thread of each process sends every second on the links that it was given, and looks what came: the leader's to the
other ranks of its machine, theirs to the leader, and between pods those of `pods.link`. A killed rank shows at once
elsewhere: its parent sees its end, its peers' sockets close.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

SEND_EVERY_S: Final = 1.0
SILENT_S: Final = 60.0
"""Gut feeling: a kernel that is compiled, a folder on a slow disk or a machine that swaps hold a process for tens of
seconds, seldom a minute."""
LINK: Final = "POLYRL_RANK_HEARTBEAT_FD"
"""The descriptor of a follower's socket."""
READ_BYTES: Final = 4096


class PeerLink(Protocol):
    """To one process that may fall silent."""

    def send_heartbeat(self) -> None:
        """Says that this side lives."""

    def heard(self) -> bool:
        """Whether anything came since it was asked last."""


class RankLink(PeerLink):
    """A pair of sockets, made before the rank was started and known to nobody else."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection

    @classmethod
    def to_parent(cls) -> RankLink:
        """A follower's link to its parent. Raises KeyError where it was not given one."""
        return cls(socket.socket(fileno=int(os.environ[LINK])))

    def send_heartbeat(self) -> None:
        # A rank that reads nothing, or has ended, is silent as well: that is what is reported, or its end, elsewhere.
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            self._connection.send(b".")

    def heard(self) -> bool:
        try:
            return bool(self._connection.recv(READ_BYTES))
        except (BlockingIOError, ConnectionResetError):
            return False


@dataclass
class LastHeard:
    """When each was last heard; `now` in seconds of any clock."""

    silent_s: float = SILENT_S
    _heard: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, now: float) -> None:
        """The process was heard; from here on its silence counts."""
        self._heard[name] = now

    def silent(self, now: float) -> str | None:
        """The first that was silent for too long."""
        return next((name for name, at in self._heard.items() if now - at > self.silent_s), None)


class _Watched(NamedTuple):
    link: PeerLink
    lost: Callable[[str], None]


class RankHeartbeat:
    """Beats and listens until closed, or until one was silent for too long."""

    def __init__(self, silent_s: float = SILENT_S) -> None:
        self._links: dict[str, _Watched] = {}
        self._heard, self._adding = LastHeard(silent_s), threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def add(self, name: str, link: PeerLink, lost: Callable[[str], None], *, starting: bool = False) -> None:
        """Watches a link: when it is silent for too long, `lost` is called with a sentence, on the heartbeat thread.
        One that is `starting` is watched from the first time that it is heard."""
        with self._adding:
            self._links[name] = _Watched(link, lost)
            if not starting:
                self._heard.note(name, time.monotonic())

    def close(self) -> None:
        """No silence is reported any more."""
        self._closed.set()

    def _run(self) -> None:
        silent = None
        while silent is None and not self._closed.is_set():
            with self._adding:
                silent = self._round(time.monotonic())
            if silent is None:
                self._closed.wait(SEND_EVERY_S)
        if silent is not None and not self._closed.is_set():
            self._links[silent].lost(f"{silent} was silent for {self._heard.silent_s:g} s")

    def _round(self, now: float) -> str | None:
        for name, (link, _) in self._links.items():
            link.send_heartbeat()
            if link.heard():
                self._heard.note(name, now)
        return self._heard.silent(now)
