"""What the watch has not shown yet, or shows too late: deletions of ours, and news that are older than an end we saw.

A watch lags behind our own requests, and a list may be older than the watch. Creations need no expectation: the reply
of a POST goes into the cache at once, and what is newer there is never replaced by what is older. A deletion leaves no
object to compare with; so its uid is remembered until its end is seen, or the time is over: then the cache is believed
again, because a forgotten expectation must not blind us for ever.
Refuses to hold: objects (see `cache`). Read next: `cache`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

EXPECTATION_S: Final = 30.0
"""Longest lag of a watch that is taken for normal; beyond it the resync decides."""

BURIAL_S: Final = 120.0
"""How long the version of an end is remembered: longer than any list takes."""

SWEEP_AT: Final = 1024
"""Entries beyond which those that are over are dropped."""


class Expectations:
    """Each with its own end. Times are of any one monotonic clock."""

    def __init__(self) -> None:
        self._leaving: dict[str, float] = {}
        self._ends: dict[Hashable, tuple[float, int]] = {}

    def leaves(self, uid: str, now: float) -> None:
        """The deletion of the object with this uid was accepted."""
        self._leaving[uid] = now + EXPECTATION_S
        if len(self._leaving) > SWEEP_AT:
            self._leaving = {one: until for one, until in self._leaving.items() if until > now}

    def is_leaving(self, uid: str, now: float) -> bool:
        """True while its end is owed."""
        return self._leaving.get(uid, now) > now

    def ended(self, place: Hashable, uid: str, version: int, now: float) -> None:
        """What had this name was gone by `version`."""
        self._leaving.pop(uid, None)
        self._ends[place] = (now + BURIAL_S, max(version, self._ends.get(place, (0.0, 0))[1]))
        if len(self._ends) > SWEEP_AT:
            self._ends = {one: end for one, end in self._ends.items() if end[0] > now}

    def is_old(self, place: Hashable, version: int, now: float) -> bool:
        """True when whatever had this name at `version` is known to be gone."""
        until, ended = self._ends.get(place, (now, 0))
        return until > now and version <= ended
