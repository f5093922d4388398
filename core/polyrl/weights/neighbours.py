"""Which of a run's agents this one dials for chunks, and which it has learned to leave alone: a value without sockets.

Agents come and go with the manager's list. Each dials few of them, in an order of its own, those on its own machine
first, so that together they form a network in which everybody is some steps from everybody. One that cannot be reached
is tried again after a pause that doubles, and is remembered from one version to the next: behind address translation
all dials fail, and then they cost nothing any more. One that gave false bytes is never asked again.

One that cannot be dialled is hidden: it offers connections to those whom it dials, and they ask it. What hidden ones
have comes to each other by those: so they count as fetching the same where anybody can be reached who lies between. One
that is hidden itself takes whom it dialled in vain for another such.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from typing import Final

from polyrl.weights.manifest import digest

NEIGHBOURS: Final = 6
"""Dialled at once: every chunk has several sources, and of a thousand agents each is four steps away."""
FIRST_PAUSE_S: Final = 5.0
LONGEST_PAUSE_S: Final = 600.0
IDLE_PAUSE_S: Final = 2.0
"""For one that had nothing to give: meanwhile others are asked, and it may have got something."""
UNREACHABLE: Final = 2 * NEIGHBOURS
"""So many tried, and none reached: it is this machine that reaches nobody."""


@dataclass(eq=False)
class _Known:
    near: bool = False
    failures: int = 0
    not_before: float = -inf
    reached: bool = False
    idle: bool = False
    """It had nothing to give, and fetched nothing, when it was asked last."""
    hidden: bool = False
    offers: bool = False
    """A connection waits on which it may be asked."""


class Neighbours:
    """Neighbours of one agent; others go by the names of their engines."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._known: dict[str, _Known] = {}
        self._liars = set[str]()
        self.is_hidden = False
        self._unreported: list[str] = []

    def add(self, name: str, *, near: bool = False, hidden: bool = False) -> None:
        """`near`: on this machine; `hidden`: it does not listen. A process that begins anew under its name is another
        one."""
        self._known[name] = _Known(near, hidden=hidden)

    def remove(self, name: str) -> None:
        self._known.pop(name, None)

    def choose(self, now: float, dialled: Collection[str]) -> str | None:
        """Whom to dial beside those; None: nobody for now."""
        able = (
            (not known.near, known.failures, digest(f"{self._own} {name}".encode()), name)
            for name, known in self._known.items()
            if known.not_before <= now and name not in dialled and name not in self._liars
            if known.offers or not known.hidden
        )
        return min(able, default=(False, 0, b"", None))[-1]

    def expected(self) -> set[str]:
        """Who may fetch the same and can be reached from here, as far as is known."""
        dialled = [known for known in self._known.values() if not known.hidden]
        tried = [known for known in self._known.values() if known.reached or known.failures]
        if len(tried) >= min(UNREACHABLE, len(dialled)) and not any(known.reached for known in tried):
            return set()
        alive = {name for name, known in self._known.items() if not (known.failures or known.idle)}
        if not any(self._known[name].reached or not self._known[name].hidden for name in alive):
            alive -= {name for name, known in self._known.items() if known.hidden}
        elif self.is_hidden:
            alive |= {name for name, known in self._known.items() if known.failures and not known.reached}
        return alive - self._liars

    def offered(self, name: str) -> bool:
        """It has opened a connection on which it may be asked, and is dialled no more; whether it is wanted."""
        known = self._known.get(name)
        if known is None or name in self._liars:
            return False
        if not known.hidden:
            known.failures, known.not_before = 0, -inf  # of dials in vain
        known.hidden = known.offers = True
        return True

    def take_offer(self, name: str) -> bool:
        """Whether there is one, which is used now."""
        known = self._known.get(name)
        if known is None or not known.offers:
            return False
        known.offers = False
        return True

    def reached(self, name: str) -> None:
        if known := self._known.get(name):
            known.reached, known.failures, known.idle = True, 0, False

    def failed(self, name: str, now: float) -> None:
        """It was not reached, was too slow, or its connection broke."""
        if known := self._known.get(name):
            known.not_before = now + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**known.failures)
            known.failures = min(known.failures + 1, 16)

    def had_nothing(self, name: str, now: float) -> None:
        if known := self._known.get(name):
            known.not_before, known.idle = now + IDLE_PAUSE_S, True

    def lied(self, name: str) -> None:
        """A chunk that it gave is not what its hash says."""
        if name not in self._liars:
            self._liars.add(name)
            self._unreported.append(name)

    def take_liars(self) -> tuple[str, ...]:
        """Liars found since this was asked last."""
        found, self._unreported = tuple(self._unreported), []
        return found
