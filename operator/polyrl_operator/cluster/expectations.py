"""What we did that the watch has not shown yet: pods whose deletion was accepted, objects whose end was seen.

A watch lags behind our own requests, and a list may be older than the watch. Creations need no expectation: the reply
of a POST goes into the cache at once, and what is newer there is never replaced by what is older. A deletion may leave
no object to put there; so its uid is remembered until its end is seen, or the time is over: then the cache is believed
again, because a forgotten expectation must not blind us for ever.
Refuses to hold: objects (see `cache`). Read next: `cache`.
"""

from __future__ import annotations

from typing import Final

EXPECTATION_S: Final = 30.0
"""Longest lag of a watch that is taken for normal; beyond it the resync decides."""

BURIAL_S: Final = 120.0
"""How long a uid that ended is kept away from lists that are older than its end: longer than any list takes."""

SWEEP_AT: Final = 1024
"""Entries beyond which those that are over are dropped."""


class Expectations:
    """By uid, each with its own end. Times are of any one monotonic clock."""

    def __init__(self) -> None:
        self._leaving: dict[str, float] = {}
        self._buried: dict[str, float] = {}

    def leaves(self, uid: str, now: float) -> None:
        """Its deletion was accepted."""
        self._leaving[uid] = now + EXPECTATION_S
        _sweep(self._leaving, now)

    def is_leaving(self, uid: str, now: float) -> bool:
        """True while its end is owed."""
        return self._leaving.get(uid, now) > now

    def ended(self, uid: str, now: float) -> None:
        """It is gone."""
        self._leaving.pop(uid, None)
        self._buried[uid] = now + BURIAL_S
        _sweep(self._buried, now)

    def is_buried(self, uid: str, now: float) -> bool:
        """True when its end was seen; whatever still shows it is old."""
        return self._buried.get(uid, now) > now


def _sweep(ends: dict[str, float], now: float) -> None:
    if len(ends) > SWEEP_AT:
        for uid in [uid for uid, end in ends.items() if end <= now]:
            del ends[uid]
