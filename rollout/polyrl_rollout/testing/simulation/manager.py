"""The manager process in virtual time: the production ledger on its journal's rows, killed and begun again.

    outcomes gather -> commit (the journal's own form) -> outbox -> messages leave, promises once their commit is synced
    kill -9    what no commit holds is gone
    power cut  of the commits that were not synced, a first few are left
               -> rows -> replay -> ledger; its clock goes on where the last row was written

There are no files: SQLite keeps transactions whole, or not at all, in their order; the power cuts of
`tests/integration/manager/test_power_loss.py` show that. `lost_by_restart` names what a restart lost and must not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from random import Random
from typing import Final, NamedTuple, Protocol

import msgspec

from polyrl.ledger import Effects, Event, Ledger, LedgerConfig, journal as form
from polyrl.ledger.journal import PageBook, PageRow, decode_state, encode_events, encode_state
from polyrl.ledger.journal.durability import Outbox
from polyrl.ledger.state import LedgerState

TAIL_ROWS: Final = 61
"""Rows after a snapshot before the next round of pages: few, so that runs of a minute meet snapshots and tails."""

PAGES_PER_COMMIT: Final = 2
"""So few that rounds are cut by deaths."""


class _Image(NamedTuple):
    """What is in the file after a commit."""

    commit: int
    snapshot: form.Row
    last_page: int
    rows: tuple[form.Row, ...]
    pages: dict[int, PageRow]


class Store(Protocol):
    """Where commits go: rows in memory, or in tests the journal's own file."""

    @property
    def commits(self) -> int:
        """How many there were so far."""

    @property
    def synced(self) -> int:
        """How many of the commits survive a power cut."""

    def commit(self, events: list[Event], state: LedgerState, at: float) -> None:
        """One transaction; none where nothing is durable."""

    def sync(self, commits: int) -> None:
        """The first so many commits survive a power cut."""

    def die(self, random: Random, *, power_loss: bool) -> int:
        """The process ends, or its machine. Returns up to which commit the journal is left."""

    def reopen(self) -> tuple[LedgerState, float]:
        """Another process reads it; the state, and the ledger's clock at its end."""


class Rows:
    """The journal's rows, without its file."""

    def __init__(self, state: LedgerState) -> None:
        self.commits = self.synced = 0
        self._book = PageBook()
        self._in_round = False
        self._images = deque([_Image(0, form.row(0, 0.0, encode_state(state)), last_page=0, rows=(), pages={})])
        """The image at the newest synced commit, and at each after it."""

    def commit(self, events: list[Event], state: LedgerState, at: float) -> None:
        """One commit, and what follows from it: a round of pages, a snapshot at its end."""
        body = encode_events(events)
        if not body:
            return
        self.commits += 1
        last = self._images[-1]
        seq = (last.rows[-1] if last.rows else last.snapshot)[0] + 1
        rows = (*last.rows, form.row(seq, at, body))
        pages = last.pages | {page[0]: page for page in self._book.write(state, PAGES_PER_COMMIT)}
        image = last._replace(commit=self.commits, rows=rows, pages=pages)
        if self._in_round and not self._book.under_way:
            image = self._snapshot(image, state, at)
        elif not self._in_round and len(rows) >= TAIL_ROWS:
            self._in_round = True
            self._book.begin_round(state)
        self._images.append(image)

    def sync(self, commits: int) -> None:
        self.synced = max(self.synced, commits)
        while len(self._images) > 1 and self._images[1].commit <= self.synced:
            self._images.popleft()

    def die(self, random: Random, *, power_loss: bool) -> int:
        survived = random.randint(self.synced, self.commits) if power_loss else self.commits
        while self._images[-1].commit > survived:
            self._images.pop()
        return survived

    def reopen(self) -> tuple[LedgerState, float]:
        _, snapshot, last_page, rows, pages = image = self._images[-1]
        pages = {number: page for number, page in pages.items() if number <= last_page}
        replayed = form.replay(snapshot, rows, pages.values())
        assert replayed is not None, "the first snapshot is always there"
        self.commits = self.synced = image.commit
        self._images = deque([image._replace(pages=pages)])
        self._book, self._in_round = replayed.pages, False
        self._book.last = last_page
        return replayed.state, replayed.at

    def _snapshot(self, image: _Image, state: LedgerState, at: float) -> _Image:
        seq = image.rows[-1][0]
        body = encode_state(self._book.rest(state))
        ended = set(self._book.forget_ended(state))
        self._in_round = False
        pages = {number: page for number, page in image.pages.items() if number not in ended}
        return image._replace(snapshot=form.row(seq, at, body), last_page=self._book.last, rows=(), pages=pages)


class SimulatedManager:
    """One manager with its journal; the ledger inside is another after each restart."""

    def __init__(self, config: LedgerConfig, make_store: Callable[[LedgerState], Store] = Rows) -> None:
        self.ledger = Ledger(msgspec.structs.replace(config, journal="journal-0"))
        self.store = make_store(self.ledger.state)
        self._make_store, self._journals = make_store, 1
        self.outbox = Outbox()
        self._gathered = Effects()
        self._clock_s = 0.0
        """The ledger's clock minus virtual time: it stands still while no manager runs."""

    def clock(self, now: float) -> float:
        """The ledger's clock at virtual time `now`."""
        return now + self._clock_s

    def due(self) -> float | None:
        """Virtual time of the next tick; None while nothing waits."""
        due = self.ledger.next_due()
        return None if due is None else due - self._clock_s

    def gather(self, outcome: Effects) -> None:
        """For the next commit."""
        self._gathered.events += outcome.events
        self._gathered.to_agents += outcome.to_agents
        self._gathered.to_trainer += outcome.to_trainer

    def commit(self, now: float) -> bool:
        """Commits all that was gathered; whether anybody is to hear of it."""
        gathered, self._gathered = self._gathered, Effects()
        self.store.commit(gathered.events, self.ledger.state, self.clock(now))
        self.outbox.put(self.store.commits, gathered)
        return bool(gathered.to_agents or gathered.to_trainer)

    def restart(self, now: float) -> None:
        """The process is dead; another one reads the journal."""
        self._gathered, self.outbox = Effects(), Outbox()
        state, at = self.store.reopen()
        self.ledger = Ledger(state.config, state)
        self._clock_s = at - now

    def begin_anew(self, now: float) -> None:
        """The process is dead and its journal lost; another one begins with an empty journal."""
        self._gathered, self.outbox = Effects(), Outbox()
        config = msgspec.structs.replace(self.ledger.state.config, journal=f"journal-{self._journals}")
        self._journals += 1
        self.ledger = Ledger(config)
        self.store = self._make_store(self.ledger.state)
        self._clock_s = -now


def lost_by_restart(before: LedgerState, after: LedgerState) -> list[str]:
    """Names of the parts of the state that differ (I10). A restart may forget signs of life, load, timers and recalls,
    which it learns anew; all else must be there again, to the last byte."""
    kept, found = _without_signs_of_life(before), _without_signs_of_life(after)
    names = [field.name for field in msgspec.structs.fields(LedgerState)]
    return [name for name in names if getattr(kept, name) != getattr(found, name)]


def _without_signs_of_life(state: LedgerState) -> LedgerState:
    """A copy; what the events that are not durable say is set to one value."""
    copy = decode_state(encode_state(state))
    copy.due = copy.stall_due = copy.ask_due = copy.trainer_at = copy.learner.held_until = inf
    copy.learner.rests.next_try_at = inf
    copy.counters.ignored.clear()
    copy.usage.losses.clear()
    for engine in copy.engines.values():
        engine.heard_at, engine.weights_at, engine.silent = inf, inf, False
        engine.counts_from = inf
        engine.load, engine.load_at, engine.kv_since = (0, 0, 0), inf, 0
        engine.gaps.clear()
        engine.reserved_kv.clear()
        engine.recalled = 0
    for assignment in copy.assignments.values():
        assignment.progress_at = assignment.text_sent_at = inf
        assignment.recall_cause, assignment.recall_target = None, ""
    for sample in copy.samples.values():
        sample.asks, sample.ask_due = 0, inf
    return copy
