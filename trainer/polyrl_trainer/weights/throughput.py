"""How fast receivers take what is sent to them: bytes that have left this machine, by the seconds that it took.

What the system's buffers have taken was sent to nobody yet: they hold megabytes for each connection, at the speed of
memory. So while they hold something, what has left them is what counts, over all of that time. Where they were empty
at both ends of a while, all of it went through, and the time is that between pieces that followed each other closely.
"""

from __future__ import annotations

from math import inf
from typing import Final

PAUSE_S: Final = 0.1
"""Longer between two pieces: nobody asked."""
BULK_BYTES: Final = 16 << 10
"""Smaller pieces are manifests and ends of chunks, between which receivers think: they say nothing of a network. Nor do
whiles in which less has left, as when the only receiver is frozen."""
SAMPLE_S: Final = 0.1
"""Between two samples of what the buffers hold."""
REMEMBERED_S: Final = 20.0
"""Seconds of sending after which what was before counts half, then a quarter, and so on: a network changes in a run."""


class Throughput:
    """Throughput of one thread's connections."""

    def __init__(self) -> None:
        self.bytes, self.seconds = 0.0, 0.0
        self._sent, self._queued, self._sampled_at = 0, 0, -inf
        """Since the last sample; what the buffers held then, and when that was."""
        self._close, self._close_s, self._sent_at = 0, 0.0, -inf
        """Bytes and seconds of pieces that followed each other closely since then; when the newest of them was sent."""

    @property
    def is_under_way(self) -> bool:
        """Something was sent since the last sample, or lay in the buffers then."""
        return bool(self._sent or self._queued)

    def send(self, size: int, now: float) -> None:
        """The system took so many bytes."""
        if not self.is_under_way:
            self._sampled_at = now
        self._sent += size
        if size < BULK_BYTES:
            return
        if now - self._sent_at < PAUSE_S:
            self._close += size
            self._close_s += now - self._sent_at
        self._sent_at = now

    def sample(self, queued: int, now: float) -> None:
        """The system's buffers hold so many bytes."""
        left, seconds = self._sent + self._queued - queued, now - self._sampled_at
        if not (queued or self._queued):
            left, seconds = self._close, self._close_s
        if left >= BULK_BYTES:
            self.bytes += left
            self.seconds += seconds
        self._sent, self._queued, self._sampled_at = 0, queued, now
        self._close, self._close_s = 0, 0.0

    def halve(self) -> None:
        """What was so far counts half."""
        self.bytes /= 2
        self.seconds /= 2
