"""Steps from one schema to the next: all rows in one transaction, or none."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

from polyrl.errors import ProtocolError
from polyrl.ledger import journal as form
from polyrl.ledger.audit.history import HistoryEntry, encode_entry
from polyrl.ledger.causes import MoveCause
from polyrl.ledger.events import Moved, TurnExtended
from polyrl.ledger.journal.migration import STEPS, Step, migrate

EVENTS = [
    ["Moved", 1, "straggler", 2.0],
    ["EngineRestored", "a", "proven", 2.0],
    ["TurnExtended", "0.0", b"\1\0\0\0", 3.0],
]


@pytest.fixture
def old() -> Iterator[sqlite3.Connection]:
    """A journal of schema 8 with one row of each kind."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.executescript(form.create_script(1))
        db.execute(form.INSERT_EVENTS, form.row(1, 3.0, msgspec.msgpack.encode(EVENTS)))
        state = {"assignments": {1: ["0.0", "a", 0, 0, 0, 9, 9, 1.0, 1.0, 0, "straggler", "b"]}, "gone": True}
        state |= {"groups": {4: [[4, 7, "train"], [0]], 5: [[5, 6, "train"], [0]]}, "queue": [[0, 4], [0, 5]]}
        engines = [("a", 3, "", "spot"), ("b", 3, "leaves", "spot"), ("c", -1, "", "spot"), ("r", 3, "", "reserved")]
        fields = ("name", "version", "draining", "pool")
        state |= {"window_open": False, "engines": {one[0]: dict(zip(fields, one, strict=True)) for one in engines}}
        db.execute(form.REPLACE_SNAPSHOT, (*form.row(0, 0.0, msgspec.msgpack.encode(state)), 0))
        for number, event in enumerate(EVENTS[:2], 1):
            body = msgspec.msgpack.encode([2.0, event, 0, "0.0"])
            entry = encode_entry(number, HistoryEntry(0.0, TurnExtended("", b"", 0.0)))[-4:]
            entry = body + form.row(number, 0.0, body)[3].to_bytes(len(entry))
            db.execute(form.INSERT_ENTRY, (number, entry))
            db.execute(form.INSERT_SUBJECT, ("0.0", number))
        db.execute("PRAGMA user_version=8")
        yield db


def rows(db: sqlite3.Connection) -> list[Any]:
    queries = (form.SELECT_EVENTS, form.SELECT_SNAPSHOT, form.SELECT_HISTORY, "PRAGMA user_version")
    return [db.execute(query).fetchall() for query in queries]


def test_each_schema_has_its_step() -> None:
    assert sorted(STEPS) == list(range(form.OLDEST_SCHEMA, form.JOURNAL_SCHEMA))


def test_rows_of_events_state_and_history_are_those_of_this_version(old: sqlite3.Connection) -> None:
    migrate(old)
    (row,) = old.execute(form.SELECT_EVENTS).fetchall()
    assert form.decode_events(row[2]) == [
        Moved(1, MoveCause.REBALANCED, at=2.0),
        TurnExtended("0.0", b"\1\0\0\0", at=3.0),
    ]
    ((_, _, body, _),) = old.execute(form.SELECT_SNAPSHOT).fetchall()
    state = msgspec.msgpack.decode(body)
    assert state["assignments"][1][10] == "rebalanced"
    assert state["queue"] == [[0, 6, 5], [0, 7, 4]]
    assert state["usage"] == {"present": 1}, "of four engines one could generate"
    (entry,) = old.execute(form.SELECT_HISTORY).fetchall()
    assert entry == (1, encode_entry(1, HistoryEntry(2.0, Moved(1, MoveCause.REBALANCED, at=2.0), 0, sample="0.0")))
    assert old.execute("SELECT count(*) FROM subjects").fetchone() == (1,)
    assert old.execute("PRAGMA user_version").fetchone() == (form.JOURNAL_SCHEMA,)


def test_a_journal_of_this_version_is_left_alone(old: sqlite3.Connection) -> None:
    migrate(old)
    before = rows(old)
    changes = old.total_changes
    migrate(old)
    assert rows(old) == before
    assert old.total_changes == changes


def test_a_step_that_fails_midway_changes_nothing(old: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rows(old)

    def fail(state: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("assignments")

    monkeypatch.setitem(STEPS, 8, Step("fails", event=STEPS[8].event, state=fail))
    with pytest.raises(KeyError):
        migrate(old)
    assert rows(old) == before


@pytest.mark.parametrize("table", ["events", "snapshot"])
def test_a_damaged_row_is_not_made_whole_by_a_new_checksum(old: sqlite3.Connection, table: str) -> None:
    old.execute(f"UPDATE {table} SET checksum = checksum + 1")
    before = rows(old)
    with pytest.raises(ProtocolError, match="checksum"):
        migrate(old)
    assert rows(old) == before


def test_a_damaged_entry_of_the_history_is_not_made_whole_either(old: sqlite3.Connection) -> None:
    old.execute("UPDATE history SET entry = x'9000000000' WHERE number = 2")
    with pytest.raises(ProtocolError, match="checksum of entry of the history 2"):
        migrate(old)
