"""The trainer's devices as only their memory knows them: who holds it, while the learner needs it alone (I9)."""

from __future__ import annotations

from collections.abc import Iterable, Set

from polyrl.ledger.events import BatchPacked, Event


class DeviceWatch:
    """Watches one run's devices. What its questions return is what is wrong, in a sentence; empty if nothing is."""

    def __init__(self) -> None:
        self.learns_alone = False
        """The trainer learns where there is no room beside engines."""
        self._holding: set[str] = set()

    def rests(self, engine: str, leased: Set[str], *, asleep: bool) -> str:
        """An engine that can sleep holds no memory from now on, or takes it again. One that was frozen until the ledger
        gave it up may still follow an order from before: nobody can keep it from that."""
        if asleep:
            self._holding.discard(engine)
            return ""
        self._holding.add(engine)
        wrong = self.learns_alone and engine in leased
        return f"{engine} wakes while the trainer needs its device" if wrong else ""

    def happened(self, events: Iterable[Event], leased: Set[str]) -> str:
        """The ledger has decided this; `leased`: engines that it believes in."""
        given = any(isinstance(one, BatchPacked) and one.groups and one.wanted.alone for one in events)
        awake = sorted(self._holding & leased) if given else []
        return f"a batch that needs the devices alone is given while {awake} are awake" if awake else ""
