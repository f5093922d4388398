"""What lies in a journal file, for the one who writes it and those who read it: marks, SQL text, rows and back.

    snapshot   the state after events 1 .. seq, one row, without what is in pages
    pages      tokens and prompts of what lives (see `pages`)
    events     those after the snapshot, a row per commit, numbered without a hole
    history    the whole run without tokens (see `polyrl.ledger.audit.history`), never deleted
    subjects   which entries of the history concern which sample, group, batch or engine
    meta       the run epoch

Events older than the snapshot are deleted, and with them the tokens of everything acknowledged. What `explain` and
`check` need of them is in the history: a few entries per sample and per assignment, each of a hundred bytes or so, so a
run of a million samples can be audited from its first sample to its last.

Every snapshot, page, row of events and entry of the history carries a checksum over its number and its bytes: SQLite
itself would hand a flipped bit on as a token. A journal is read whole or refused.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable
from typing import Final, NamedTuple

from polyrl.errors import ProtocolError
from polyrl.ledger.apply.apply import apply
from polyrl.ledger.journal.codec import JOURNAL_SCHEMA, decode_events, decode_state
from polyrl.ledger.journal.pages import PageBook, PageRow
from polyrl.ledger.state import LedgerState

APPLICATION_ID: Final = 0x506F6C79
"""Marks the file as ours ("Poly"); SQLite's own field for that purpose."""

CREATE: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE events (seq INTEGER PRIMARY KEY, at REAL NOT NULL, body BLOB NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE snapshot (
  id INTEGER PRIMARY KEY CHECK (id = 1), seq INTEGER NOT NULL, at REAL NOT NULL, body BLOB NOT NULL,
  checksum INTEGER NOT NULL, last_page INTEGER NOT NULL);
CREATE TABLE pages (
  number INTEGER PRIMARY KEY, about TEXT NOT NULL, body BLOB NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE history (number INTEGER PRIMARY KEY, entry BLOB NOT NULL);
CREATE TABLE subjects (subject TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (subject, number)) WITHOUT ROWID;
"""

SELECT_EPOCH: Final = "SELECT value FROM meta WHERE key = 'epoch'"
SELECT_SNAPSHOT: Final = "SELECT seq, at, body, checksum FROM snapshot"
SELECT_LAST_PAGE: Final = "SELECT last_page FROM snapshot"
SELECT_PAGES: Final = (
    f"SELECT number, about, body, checksum FROM pages WHERE number <= ({SELECT_LAST_PAGE}) ORDER BY number"
)
SELECT_EVENTS: Final = "SELECT seq, at, body, checksum FROM events ORDER BY seq"
SELECT_HISTORY: Final = "SELECT number, entry FROM history ORDER BY number"
SELECT_HISTORY_OF: Final = (
    "SELECT DISTINCT number, entry FROM history JOIN subjects USING (number)"
    " WHERE subject IN (SELECT value FROM json_each(?)) ORDER BY number"  # a JSON list of subjects
)
SELECT_LAST_ENTRY: Final = "SELECT coalesce(max(number), 0) FROM history"
SELECT_SOME_SAMPLES: Final = "SELECT DISTINCT subject FROM subjects WHERE subject GLOB '[0-9]*.[0-9]*' LIMIT ?"

INSERT_EVENTS: Final = "INSERT INTO events VALUES (?, ?, ?, ?)"
INSERT_PAGE: Final = "INSERT INTO pages VALUES (?, ?, ?, ?)"
INSERT_ENTRY: Final = "INSERT INTO history VALUES (?, ?)"
INSERT_SUBJECT: Final = "INSERT OR IGNORE INTO subjects VALUES (?, ?)"
REPLACE_SNAPSHOT: Final = "INSERT OR REPLACE INTO snapshot VALUES (1, ?, ?, ?, ?, ?)"
DELETE_EVENTS: Final = "DELETE FROM events WHERE seq <= ?"
DELETE_PAGE: Final = "DELETE FROM pages WHERE number = ?"
DELETE_UNFINISHED_ROUND: Final = f"DELETE FROM pages WHERE number > ({SELECT_LAST_PAGE})"

Row = tuple[int, float, bytes, int]
"""seq, at, body, checksum"""


class Replayed(NamedTuple):
    """A journal's events, folded."""

    state: LedgerState
    at: float
    """The ledger's clock at its end."""
    seq: int
    snapshot_bytes: int
    tail_bytes: int
    pages: PageBook


def create_script(run_epoch: int) -> str:
    """Everything a new file needs, in one transaction."""
    return (
        f"BEGIN IMMEDIATE; PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={JOURNAL_SCHEMA}; {CREATE}"
        f"INSERT INTO meta VALUES ('epoch', '{run_epoch}'); COMMIT;"
    )


def foreign(db: sqlite3.Connection) -> str:
    """Why a file is not one that this version reads; empty when it is."""
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (schema,) = db.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        return "is not a PolyRL journal"
    if schema != JOURNAL_SCHEMA:
        return f"is of journal schema {schema}, this version reads {JOURNAL_SCHEMA}"
    return ""


def row(seq: int, at: float, body: bytes) -> Row:
    """A row of events, or the snapshot's."""
    return seq, at, body, _checksum(seq, body)


def replay(snapshot: Row | None, events: Iterable[Row], pages: Iterable[PageRow] = ()) -> Replayed | None:
    """The state that the rows hold; None when there is none yet. Raises
    ProtocolError on any row that is damaged, missing or out of place."""
    if snapshot is None:
        if any(True for rows in (events, pages) for _ in rows):
            raise ProtocolError("it holds events without a snapshot to begin with")
        return None
    seq, at, body, checksum = snapshot
    _check(seq, body, checksum, "snapshot")
    state, tail, book = decode_state(body), 0, PageBook()
    book.restore(state, pages)
    for number, when, packed, packed_checksum in events:
        if number != seq + 1:
            raise ProtocolError(f"row {seq + 1} of the events is missing")
        _check(number, packed, packed_checksum, "row of events")
        _fold_all(state, packed, number)
        seq, at, tail = number, when, tail + len(packed)
    return Replayed(state, at, seq, len(body), tail, book)


def _fold_all(state: LedgerState, packed: bytes, number: int) -> None:
    try:
        for event in decode_events(packed):
            apply(state, event)
    except (KeyError, ValueError, IndexError) as error:
        raise ProtocolError(f"row {number} of the events does not follow from what is before it: {error!r}") from error


def _check(seq: int, body: bytes, checksum: int, what: str) -> None:
    if _checksum(seq, body) != checksum:
        raise ProtocolError(f"the checksum of {what} {seq} does not match")


def _checksum(seq: int, body: bytes) -> int:
    return zlib.crc32(body, seq & 0xFFFFFFFF)
