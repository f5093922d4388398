"""What the watch has not shown yet, or shows too late: deletions of ours, and objects older than an end that was seen.

A watch lags behind our own requests, and a list may be older than the watch. Creations need no expectation: the reply
of a POST goes into the cache at once, and what is newer there is never replaced by what is older. A deletion leaves no
object to compare with; so its uid is remembered until its end is seen, or until a timeout: then the cache is believed
again, because a forgotten expectation must not blind us for ever.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

DELETION_TIMEOUT_S: Final = 30.0
"""Longest lag of a watch that is taken for normal; beyond it the resync decides."""

TOMBSTONE_TTL_S: Final = 120.0
"""How long the version of an end is remembered: longer than any list takes."""

SWEEP_AT: Final = 1024
"""Entries beyond which expired ones are dropped."""


class Expectations:
    """Each expires by itself. Times are of any one monotonic clock."""

    def __init__(self) -> None:
        self._deletions: dict[str, float] = {}
        self._tombstones: dict[Hashable, tuple[float, int]] = {}

    def deletion_accepted(self, uid: str, now: float) -> None:
        """The deletion of the object with this uid was accepted."""
        self._deletions[uid] = now + DELETION_TIMEOUT_S
        if len(self._deletions) > SWEEP_AT:
            self._deletions = {uid: until for uid, until in self._deletions.items() if until > now}

    def is_pending(self, uid: str, now: float) -> bool:
        """True while an accepted deletion has not been seen to end."""
        return self._deletions.get(uid, now) > now

    def ended(self, place: Hashable, uid: str, version: int, now: float) -> None:
        """What had this name was gone by `version`."""
        self._deletions.pop(uid, None)
        newest = max(version, self._tombstones.get(place, (0.0, 0))[1])
        self._tombstones[place] = (now + TOMBSTONE_TTL_S, newest)
        if len(self._tombstones) > SWEEP_AT:
            self._tombstones = {place: stone for place, stone in self._tombstones.items() if stone[0] > now}

    def is_old(self, place: Hashable, version: int, now: float) -> bool:
        """True when whatever had this name at `version` is known to be gone."""
        until, ended = self._tombstones.get(place, (now, 0))
        return until > now and version <= ended
