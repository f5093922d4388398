"""Whose turn is next: round robin over tenants, and within a tenant what is most urgent, in the order of arrival.

With one queue for all, whoever adds without end delays everybody by what he added. Here a tenant with something
waiting gets his turn before any other has two, and none holds more than `most` turns at once, `beside` of them while
others have something waiting or a turn: his turns leave room for the others', and share less of the one thread. Keys
leave every second turn of their tenant to his less urgent ones, and these come in the end. A plain value: no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from enum import IntEnum
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Urgency(IntEnum):
    """The most urgent first."""

    LOSS = 0
    """A pod goes, and its notice may leave seconds."""
    EDIT = 1
    """Somebody waits for what he wrote."""
    NONE = 2
    """Any other cause."""


class FairQueue(Generic[Key]):
    """Call `release` for each key that `take` gave, once its turn is over."""

    def __init__(self, most: int, beside: int) -> None:
        self._most, self._beside = most, beside
        self._waiting: dict[str, tuple[dict[Key, float], ...]] = {}
        """By tenant, whose turn is next first: his keys by urgency, in order of arrival, and since when each waits."""
        self._left: set[tuple[str, int]] = set()
        """Tenants and urgencies that had a turn while less urgent keys waited: the next one is left to these."""
        self._busy: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(len(keys) for one in self._waiting.values() for keys in one)

    def add(self, tenant: str, key: Key, since: float, *, urgency: Urgency = Urgency.NONE) -> None:
        """Does nothing for a key that waits already, unless it is more urgent by now. A tenant with nothing waiting
        comes last."""
        waiting = self._waiting.setdefault(tenant, tuple({} for _ in Urgency))
        known = next((one for one, keys in enumerate(waiting) if key in keys), None)
        if known is None or urgency < known:
            waiting[urgency][key] = since if known is None else waiting[known].pop(key)

    def take(self) -> Key | None:
        """None: nothing waits that may begin."""
        most = self._beside if len(self._waiting.keys() | self._busy.keys()) > 1 else self._most
        tenant = next((one for one in self._waiting if self._busy.get(one, 0) < most), None)
        if tenant is None:
            return None
        waiting = self._waiting.pop(tenant)
        keys = waiting[self._next(tenant, waiting)]
        key = next(iter(keys))
        del keys[key]
        if any(waiting):
            self._waiting[tenant] = waiting
        self._busy[tenant] += 1
        return key

    def _next(self, tenant: str, waiting: tuple[dict[Key, float], ...]) -> int:
        for urgency, keys in enumerate(waiting):
            rest = any(waiting[urgency + 1 :])
            leaves = rest and (tenant, urgency) in self._left
            self._left.discard((tenant, urgency))
            if not keys or leaves:
                continue
            if rest:
                self._left.add((tenant, urgency))
            return urgency
        raise AssertionError("unreachable: a tenant without keys does not wait")

    def release(self, tenant: str) -> None:
        """One of the tenant's turns is over."""
        self._busy[tenant] -= 1
        if not self._busy[tenant]:
            del self._busy[tenant]

    def oldest(self) -> float | None:
        """Since when the key waits that waits longest; None: none does."""
        return min((since for one in self._waiting.values() for keys in one for since in keys.values()), default=None)
