"""The manager process in virtual time: the production ledger on its journal's rows, killed and begun again.

    outcome -> rows (the journal's own form) -> messages leave
    kill -9 -> rows -> replay -> ledger; its clock goes on where the last row was written

What is not in the rows is gone, as after the death of a process. There are no files: SQLite keeps rows whole, or not at
all. `lost_by_restart` says what a restart lost that it must not lose.
"""

from __future__ import annotations

from math import inf
from typing import Final

import msgspec

from polyrl.ledger import Event, Ledger, LedgerConfig, journal as form
from polyrl.ledger.journal import PageBook, PageRow, decode_state, encode_events, encode_state
from polyrl.ledger.state import LedgerState

TAIL_ROWS: Final = 61
"""Rows after a snapshot before the next round of pages: few, so that runs of a minute meet snapshots and tails."""

PAGES_PER_COMMIT: Final = 2
"""So few that rounds are cut by deaths."""


class SimulatedManager:
    """One manager with its journal; the ledger inside is another after each restart."""

    def __init__(self, config: LedgerConfig) -> None:
        self.ledger = Ledger(config)
        self._clock_s = 0.0
        """The ledger's clock minus virtual time: it stands still while no manager runs."""
        self._rows: list[form.Row] = []
        self._pages: dict[int, PageRow] = {}
        self._book = PageBook()
        self._snapshot, self._last_page = form.row(0, 0.0, encode_state(self.ledger.state)), 0
        self._in_round = False

    def clock(self, now: float) -> float:
        """The ledger's clock at virtual time `now`."""
        return now + self._clock_s

    def due(self) -> float | None:
        """Virtual time of the next tick; None while nothing waits."""
        due = self.ledger.next_due()
        return None if due is None else due - self._clock_s

    def keep(self, events: list[Event], now: float) -> None:
        """One commit of the journal, and what follows from it: a round of pages, a snapshot at its end."""
        body = encode_events(events)
        if not body:
            return
        state = self.ledger.state
        self._rows.append(form.row(self._seq() + 1, self.clock(now), body))
        self._pages |= {page[0]: page for page in self._book.write(state, PAGES_PER_COMMIT)}
        if self._in_round and not self._book.under_way:
            self._take_snapshot(now)
        elif not self._in_round and len(self._rows) >= TAIL_ROWS:
            self._in_round = True
            self._book.begin_round(state)

    def restart(self, now: float) -> None:
        """The process is dead; another one reads the journal."""
        self._pages = {number: page for number, page in self._pages.items() if number <= self._last_page}
        replayed = form.replay(self._snapshot, self._rows, self._pages.values())
        assert replayed is not None, "the first snapshot is always there"
        self.ledger = Ledger(replayed.state.config, replayed.state)
        self._book, self._in_round = replayed.pages, False
        self._book.last = self._last_page
        self._clock_s = replayed.at - now

    def _seq(self) -> int:
        return self._rows[-1][0] if self._rows else self._snapshot[0]

    def _take_snapshot(self, now: float) -> None:
        state = self.ledger.state
        self._snapshot = form.row(self._seq(), self.clock(now), encode_state(self._book.rest(state)))
        self._last_page, self._in_round = self._book.last, False
        for number in self._book.forget_ended(state):
            del self._pages[number]
        self._rows.clear()


def lost_by_restart(before: LedgerState, after: LedgerState) -> list[str]:
    """Names of the parts of the state that differ (I10). A restart may forget signs of life, load, timers and recalls,
    which it learns anew; all else must be there again, to the last byte."""
    kept, found = _without_signs_of_life(before), _without_signs_of_life(after)
    names = [field.name for field in msgspec.structs.fields(LedgerState)]
    return [name for name in names if getattr(kept, name) != getattr(found, name)]


def _without_signs_of_life(state: LedgerState) -> LedgerState:
    """A copy; what the events that are not durable say is set to one value."""
    copy = decode_state(encode_state(state))
    copy.due = copy.trainer_at = inf
    copy.counters.ignored.clear()
    for engine in copy.engines.values():
        engine.heard_at = engine.weights_at = inf
        engine.load = (0, 0, 0)
        engine.gaps.clear()
        engine.reserved_kv.clear()
        engine.recalled = 0
    for assignment in copy.assignments.values():
        assignment.progress_at = inf
        assignment.recall_cause, assignment.recall_target = None, ""
    for sample in copy.samples.values():
        sample.asks, sample.ask_due = 0, inf
    return copy
