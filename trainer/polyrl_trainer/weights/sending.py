"""What receivers have asked for and what is on its way to them: bounded in all, and shared out in turns.

A frame is on its way until libzmq has let go of it, which for a receiver that reads nothing is never. Such receivers
fill the common room once and then hold one frame each at most; the others go on through what they read.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from zmq import MessageTracker

from polyrl.wire import FromPuller

MAX_BYTES: Final = 256 << 20
"""On their way to all receivers together; twice what a link of 100 Gbit/s holds over 10 ms."""
MAX_WAITING: Final = 8
"""Requests of one receiver that wait for their turn; twice what a receiver of ours has outstanding."""


class Sending:
    """Who gets the next frame. A receiver is a ROUTER's identity of its connection."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._waiting: dict[bytes, deque[FromPuller]] = {}
        self._sent: dict[bytes, list[tuple[MessageTracker, int]]] = {}

    @property
    def num_bytes(self) -> int:
        """On their way, as of the last call of `next`."""
        return sum(size for frames in self._sent.values() for _, size in frames)

    @property
    def waits(self) -> bool:
        """True while somebody waits for room."""
        return bool(self._waiting)

    def ask(self, receiver: bytes, request: FromPuller) -> bool:
        """False when this receiver has asked for too much already: it asks again at its own deadline."""
        waiting = self._waiting.setdefault(receiver, deque())
        if len(waiting) >= MAX_WAITING:
            return False
        waiting.append(request)
        return True

    def next(self) -> tuple[bytes, FromPuller] | None:
        """Whose turn it is, and what it asked for; None when all wait for room, or nobody waits."""
        self._forget_what_has_left()
        is_room = self.num_bytes < self._max_bytes
        for receiver, requests in self._waiting.items():
            # One frame is always granted: else receivers that read nothing would keep out all others.
            if is_room or receiver not in self._sent:
                del self._waiting[receiver]
                request = requests.popleft()
                if requests:
                    self._waiting[receiver] = requests
                return receiver, request
        return None

    def sent(self, receiver: bytes, tracker: MessageTracker, size: int) -> None:
        """`size` bytes are on their way, until `tracker` is done."""
        self._sent.setdefault(receiver, []).append((tracker, size))

    def _forget_what_has_left(self) -> None:
        left = {peer: [frame for frame in frames if not frame[0].done] for peer, frames in self._sent.items()}
        self._sent = {peer: frames for peer, frames in left.items() if frames}
