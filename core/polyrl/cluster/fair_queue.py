"""Whose turn is next: round robin over tenants, and within a tenant the order of arrival, what is urgent first.

With one queue for all, whoever adds without end delays everybody by what he added. Here a tenant with something
waiting gets his turn before any other has two, and none holds more than `most` turns at once, `beside` of them while
others have something waiting or a turn: his turns leave room for the others', and share less of the one thread. Urgent
keys leave every second turn of their tenant to his others, so that these come in the end. A plain value: no clock, no
waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class FairQueue(Generic[Key]):
    """Call `release` for each key that `take` gave, once its turn is over."""

    def __init__(self, most: int, beside: int) -> None:
        self._most, self._beside = most, beside
        self._waiting: dict[str, tuple[dict[Key, float], dict[Key, float]]] = {}
        """By tenant, whose turn is next first: his urgent keys and his others, each in order of arrival, and since when
        each waits."""
        self._after_urgent: set[str] = set()
        """Tenants with others waiting whose last turn was for an urgent key."""
        self._busy: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(len(urgent) + len(others) for urgent, others in self._waiting.values())

    def add(self, tenant: str, key: Key, since: float, *, urgent: bool = False) -> None:
        """Does nothing for a key that waits already, unless it is urgent by now. A tenant with nothing waiting comes
        last."""
        hurried, others = self._waiting.setdefault(tenant, ({}, {}))
        if urgent:
            hurried.setdefault(key, others.pop(key, since))
        elif key not in hurried:
            others.setdefault(key, since)

    def take(self) -> Key | None:
        """None: nothing waits that may begin."""
        most = self._beside if len(self._waiting.keys() | self._busy.keys()) > 1 else self._most
        tenant = next((one for one in self._waiting if self._busy.get(one, 0) < most), None)
        if tenant is None:
            return None
        hurried, others = self._waiting.pop(tenant)
        keys = hurried if hurried and not (others and tenant in self._after_urgent) else others
        key = next(iter(keys))
        del keys[key]
        self._after_urgent.discard(tenant)
        if hurried or others:
            self._waiting[tenant] = hurried, others
            if keys is hurried:
                self._after_urgent.add(tenant)
        self._busy[tenant] += 1
        return key

    def release(self, tenant: str) -> None:
        """One of the tenant's turns is over."""
        self._busy[tenant] -= 1
        if not self._busy[tenant]:
            del self._busy[tenant]

    def oldest(self) -> float | None:
        """Since when the key waits that waits longest; None: none does."""
        return min((since for both in self._waiting.values() for keys in both for since in keys.values()), default=None)
