"""The journal: each durable fact in SQLite (WAL) before a message that depends on it leaves, a transaction per batch.

    append(facts)  gathers; commit() makes them safe; restore() gives the state back: newest snapshot + facts after it

Restart costs what lives: once the tail outgrows SNAPSHOT_TAIL_BYTES a snapshot of the state replaces it, and with it go
the tokens of everything acknowledged. The events of each sample (`polyrl.ledger.history`) stay for `explain`.

`synchronous=NORMAL`: a killed process loses nothing; a machine that loses power may lose the newest transactions, never
half of one, and agents and trainer make that good (they repeat what was not answered). One writer: the file is locked
for the life of the process.

Refuses to hold: rules, a second kind of replay. Read next: `polyrl.ledger.fold`.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from polyrl.errors import InvalidData, ProtocolError, RunFailed
from polyrl.ledger.codec import JOURNAL_SCHEMA, decode_facts, decode_state, encode_facts, encode_state
from polyrl.ledger.facts import Fact
from polyrl.ledger.fold import fold
from polyrl.ledger.history import Event, Historian
from polyrl.ledger.state import State

APPLICATION_ID: Final = 0x506F6C79
"""Marks the file as ours ("Poly"); SQLite's own field for that purpose."""

SNAPSHOT_TAIL_BYTES: Final = 32 << 20
"""Facts after the newest snapshot, at least; replaying 32 MiB takes well under a second."""

SNAPSHOT_RATIO: Final = 4
"""And at least this many times the last snapshot's size, so that snapshots stay a fraction of what is written."""

LOCK_DEADLINE_S: Final = 5.0
"""A predecessor that was killed lets go of its lock at once; one that lives does not, and we must not wait for it."""

_SCHEMA: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE facts (seq INTEGER PRIMARY KEY, at REAL NOT NULL, body BLOB NOT NULL);
CREATE TABLE snapshot (
  id INTEGER PRIMARY KEY CHECK (id = 1), seq INTEGER NOT NULL, at REAL NOT NULL, body BLOB NOT NULL);
CREATE TABLE events (sample TEXT NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL, data BLOB NOT NULL);
CREATE INDEX events_of_sample ON events (sample);
CREATE TABLE incarnations (wall REAL NOT NULL, at REAL NOT NULL);
"""


class Journal:
    """One open journal file. Raises RunFailed when it cannot be written: what is not safe must not be told."""

    def __init__(self, path: Path, epoch: int) -> None:
        """Opens or creates. Raises InvalidData naming what is wrong with a file that is not ours, or is damaged."""
        self._path = path
        self._epoch = epoch
        self._encode = msgspec.json.encode
        self._pending: list[bytes] = []
        self._events: list[Event] = []
        self._historian: Historian | None = None
        self._tail_bytes = 0
        self._snapshot_bytes = 0
        self._seq = 0
        fresh = not path.exists() or path.stat().st_size == 0
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(path, timeout=LOCK_DEADLINE_S, isolation_level=None)
            if not fresh:
                self._check_ours()
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            if fresh:
                self._create()
        except sqlite3.Error as error:
            raise InvalidData(f"{path}: not a usable journal: {error}") from error

    def restore(self) -> tuple[State | None, float]:
        """The state as it was, and the ledger's clock at its end; (None, 0) for a new journal.

        Raises InvalidData when the journal is of another epoch, or damaged.
        """
        try:
            kept = self._db.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()
            if kept is None or int(kept[0]) != self._epoch:
                raise InvalidData(f"{self._path}: holds run epoch {kept and kept[0]}, this is epoch {self._epoch}")
            return self._replay()
        except (sqlite3.Error, ProtocolError, KeyError, ValueError) as error:
            raise InvalidData(f"{self._path}: the journal is damaged and cannot be replayed: {error}") from error

    def begin(self, state: State, at: float) -> None:
        """Starts an incarnation: `state` is what the coming facts change, `at` the ledger's clock now."""
        self._historian = Historian(state)
        self._db.execute("INSERT INTO incarnations VALUES (?, ?)", (time.time(), at))
        if not self._seq:
            self._snapshot(state, at)

    def append(self, facts: Sequence[Fact], state: State) -> None:
        """Gathers facts (and the events they tell) for the next commit; `state` is the ledger's, after them."""
        assert self._historian is not None, "begin() comes first"
        body = encode_facts(facts)
        if body:
            self._pending.append(body)
            for fact in facts:
                self._events.extend(self._historian.tell(fact, state))

    def commit(self, state: State, at: float) -> None:
        """One transaction with all that was gathered. Raises RunFailed when the disk does not take it."""
        if not self._pending:
            return
        rows = [(self._seq + number, at, body) for number, body in enumerate(self._pending, 1)]
        events = [(e.sample, e.at, e.kind, self._encode(e.data)) for e in self._events]
        self._in_transaction(lambda: self._insert(rows, events))
        self._seq += len(rows)
        self._tail_bytes += sum(map(len, self._pending))
        self._pending.clear()
        self._events.clear()
        if self._tail_bytes > max(SNAPSHOT_TAIL_BYTES, SNAPSHOT_RATIO * self._snapshot_bytes):
            self._snapshot(state, at)

    def close(self) -> None:
        """Lets go of the file. What was not committed is dropped: nobody has seen it."""
        self._db.close()

    def _insert(self, rows: list[tuple[int, float, bytes]], events: list[tuple[str, float, str, bytes]]) -> None:
        self._db.executemany("INSERT INTO facts VALUES (?, ?, ?)", rows)
        self._db.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", events)

    def _in_transaction(self, write: Callable[[], object]) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            write()
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise RunFailed(f"{self._path}: the journal cannot be written: {error}") from error

    def _snapshot(self, state: State, at: float) -> None:
        body = encode_state(state)

        def write() -> None:
            self._db.execute("INSERT OR REPLACE INTO snapshot VALUES (1, ?, ?, ?)", (self._seq, at, body))
            self._db.execute("DELETE FROM facts WHERE seq <= ?", (self._seq,))

        self._in_transaction(write)
        self._tail_bytes, self._snapshot_bytes = 0, len(body)

    def _replay(self) -> tuple[State | None, float]:
        kept = self._db.execute("SELECT seq, at, body FROM snapshot").fetchone()
        if kept is None:
            return None, 0.0
        seq, at, body = kept
        state = decode_state(body)
        for number, when, facts in self._db.execute(
            "SELECT seq, at, body FROM facts WHERE seq > ? ORDER BY seq", (seq,)
        ):
            if number != seq + 1:
                raise ValueError(f"fact {seq + 1} is missing")
            for fact in decode_facts(facts):
                fold(state, fact)
            seq, at = number, when
            self._tail_bytes += len(facts)
        self._seq, self._snapshot_bytes = seq, len(body)
        return state, at

    def _check_ours(self) -> None:
        (application,) = self._db.execute("PRAGMA application_id").fetchone()
        (schema,) = self._db.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION_ID:
            raise InvalidData(f"{self._path}: is not a PolyRL journal")
        if schema != JOURNAL_SCHEMA:
            raise InvalidData(f"{self._path}: is of journal schema {schema}, this version reads {JOURNAL_SCHEMA}")

    def _create(self) -> None:
        self._db.executescript(
            f"BEGIN; PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={JOURNAL_SCHEMA}; {_SCHEMA}"
            f"INSERT INTO meta VALUES ('epoch', '{self._epoch}'); COMMIT;"
        )
