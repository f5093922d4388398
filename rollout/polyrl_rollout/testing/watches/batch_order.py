"""Complete groups leave in the order in which they were completed, all of them, and so do those that come back (I2)."""

from __future__ import annotations

from collections.abc import Iterable

from polyrl.ledger import events as f
from polyrl.ledger.state import LedgerState, step_key


class BatchOrder:
    """Watches the batches of one run; what it returns is what is wrong, in a sentence."""

    def __init__(self) -> None:
        self._ready: dict[str, list[int]] = {}
        """By step: complete groups that are in no batch, in their order."""
        self._batches: dict[int, list[int]] = {}
        """Groups of each batch that may come back."""

    def follow(self, state: LedgerState) -> None:
        """Another manager goes on with what its journal holds."""
        self._ready = {key: list(step.ready) for key, step in state.steps.items()}
        self._batches = {number: list(batch.groups) for number, batch in state.batches.items()} | {
            number: list(groups) for number, groups in state.kept.items()
        }

    def happened(self, events: Iterable[f.Event], state: LedgerState) -> str:
        """The ledger has decided this."""
        wrong = ""
        for event in events:
            match event:
                case f.GroupCompleted(number):
                    self._ready.setdefault(_key(state, number), []).append(number)
                case f.GroupDiscarded(number):
                    self._discard(number)
                case f.BatchPacked():
                    wrong = wrong or self._pack(event)
                case f.BatchReturned(batch):
                    wrong = wrong or self._offer_again(batch, state)
                case f.BatchReleased(batch):
                    del self._batches[batch]
                case f.BatchAcknowledged(batch) if not event.kept:
                    del self._batches[batch]
        return wrong

    def _discard(self, number: int) -> None:
        for groups in (*self._ready.values(), *self._batches.values()):
            if number in groups:
                groups.remove(number)

    def _pack(self, event: f.BatchPacked) -> str:
        ready = self._ready.get(step_key(event.wanted.step, event.wanted.purpose), [])
        first, ready[: len(event.groups)] = ready[: len(event.groups)], []
        if event.groups:
            self._batches[event.batch] = list(event.groups)
        wrong = first != list(event.groups)
        return f"batch {event.batch} holds groups {event.groups}, and {first} were complete before" if wrong else ""

    def _offer_again(self, batch: int, state: LedgerState) -> str:
        groups = self._batches.pop(batch)
        for number in reversed(groups):
            self._ready.setdefault(_key(state, number), []).insert(0, number)
        gone = [number for number in groups if number not in state.groups]
        return f"groups {gone} of batch {batch} are gone, and were to be offered again" if gone else ""


def _key(state: LedgerState, number: int) -> str:
    entry = state.groups.get(number)
    return "" if entry is None else step_key(entry.group.step, entry.group.purpose)
