"""Reads a run's journal from outside, while its manager writes it or long after. Never writes, never blocks.

Everything is read in one transaction, so it belongs together; the writer goes on meanwhile. Where even the folder is
read-only, a journal whose writer has closed it is still read.

A file that is not ours, of another schema, or damaged is refused in one sentence; nothing is half-read. A received file
may be made to hurt: it has a journal's tables and nothing else, no value is longer than it, and a query takes as many
steps as its size allows.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from polyrl.errors import InvalidData, ProtocolError, UserError
from polyrl.ledger import journal as form
from polyrl.ledger.audit.history import RUN, HistoryEntry, ManagerStarted, decode_entry
from polyrl.ledger.journal.migration import is_old, migrate

BUSY_S: Final = 5.0
"""A writer that opens or closes holds the file for a moment."""


UNREADABLE: Final = (sqlite3.Error, UnicodeDecodeError)
"""What SQLite raises on a damaged file; its own words about damage may be no text."""

STEPS_PER_BYTE: Final = 10
"""Steps of SQLite's machine for each byte of the file: a row takes about ten, and has ten bytes at least."""

FREE_STEPS: Final = 10_000_000
"""For a small file, a second's worth."""

STEPS_PER_COUNT: Final = 100_000
"""Between two counts of the steps of a query."""

MIN_VALUE_BYTES: Final = 1 << 20
"""A file's size bounds its values; SQLite counts our own query as one."""

STEPS_OF_MIGRATION: Final = 4
"""Times the steps of a query that a migration may take: each table is read, and rows are written again."""

WRONG_VALUES: Final = (ProtocolError, ValueError, TypeError, LookupError, AttributeError, RecursionError, MemoryError)
"""What decoding raises on a damaged row, whose columns may even have other types, and bringing an older one forward."""


class JournalReader:
    """One journal, at one moment. All methods raise InvalidData when it turns out to be damaged."""

    def __init__(self, path: Path, db: sqlite3.Connection) -> None:
        self.path = path
        self._db = db
        self._steps = _StepBound(_allowed_steps(path))
        self._steps.bound(db)

    def history(self) -> Iterator[HistoryEntry]:
        """All of it, in order; the file is looked through first, so that no entry can be missing."""
        (state,) = next(self._rows("PRAGMA quick_check(1)"))
        if state != "ok":
            raise _damaged(self.path, ValueError(state))
        return map(self._decode, self._rows(form.SELECT_HISTORY))

    def history_of(self, *subjects: str) -> list[HistoryEntry]:
        """What is filed under samples, groups, batches, engines or the run, in order."""
        return [self._decode(row) for row in self._rows(form.SELECT_HISTORY_OF, json.dumps(subjects))]

    def some_samples(self, limit: int) -> list[str]:
        """Names of a few samples that exist."""
        return [name for (name,) in self._rows(form.SELECT_SOME_SAMPLES, limit)]

    def replay(self) -> form.Replayed | None:
        """The ledger's state, from the newest snapshot and the events after it; None before the first."""
        try:
            snapshot = next(self._rows(form.SELECT_SNAPSHOT), None)
            return form.replay(snapshot, self._rows(form.SELECT_EVENTS), self._rows(form.SELECT_PAGES))
        except WRONG_VALUES as error:
            raise _damaged(self.path, error) from error

    def moment_text(self, at: float) -> str:
        """Date and time of the ledger's clock `at`, as its newest incarnation has it."""
        starts = [
            entry.event.unix_s - entry.at for entry in self.history_of(RUN) if isinstance(entry.event, ManagerStarted)
        ]
        try:
            return f"{datetime.fromtimestamp(at + (starts[-1] if starts else 0.0), UTC):%Y-%m-%d %H:%M:%S} UTC"
        except (OverflowError, ValueError, OSError):
            return "no time of any clock"

    def _rows(self, query: str, *values: object) -> Iterator[Any]:
        self._steps.taken = 0
        try:
            # Not `yield from`: it would close the cursor of a generator that nobody exhausts, after the database.
            for row in self._db.execute(query, values):  # noqa: UP028
                yield row
        except UNREADABLE as error:
            raise _damaged(self.path, error) from error

    def _decode(self, row: tuple[int, bytes]) -> HistoryEntry:
        try:
            return decode_entry(*row)
        except WRONG_VALUES as error:
            raise _damaged(self.path, error) from error


class _StepBound:
    """Ends what takes too many of them: pages of a made-up file may lead to each other again and again."""

    def __init__(self, allowed: int) -> None:
        self._allowed, self.taken = allowed, 0

    def bound(self, db: sqlite3.Connection) -> None:
        """From now on its queries count."""
        db.set_progress_handler(self._count, STEPS_PER_COUNT)

    def _count(self) -> bool:
        self.taken += STEPS_PER_COUNT
        return self.taken > self._allowed


def _allowed_steps(path: Path) -> int:
    return FREE_STEPS + STEPS_PER_BYTE * _size(path)


@contextmanager
def open_journal(path: Path) -> Iterator[JournalReader]:
    """The journal at `path`. Raises UserError when there is none, InvalidData when it cannot be read as one."""
    if not path.is_file():
        raise UserError(f"{path}: there is no journal; a run keeps one once its manager has started")
    try:
        db = _connect(path)
    except UNREADABLE as error:
        raise InvalidData(f"{path}: not a readable journal: {_one_line(error)}") from error
    try:
        problem = _problem(path, db)
        if problem:
            raise InvalidData(f"{path}: {_one_line(problem)}")
        if is_old(db):
            db = _migrated_copy(path, db)
        yield JournalReader(path, db)
    finally:
        db.close()


def _problem(path: Path, db: sqlite3.Connection) -> str:
    try:
        return form.foreign(db)
    except UNREADABLE as error:
        raise _damaged(path, error) from error


def _migrated_copy(path: Path, db: sqlite3.Connection) -> sqlite3.Connection:
    """In memory: only a manager changes the file. Closes `db`."""
    copy = sqlite3.connect(":memory:", isolation_level=None)
    try:
        with closing(db):
            db.backup(copy)
        _StepBound(STEPS_OF_MIGRATION * _allowed_steps(path)).bound(copy)
        migrate(copy)
    except (*UNREADABLE, *WRONG_VALUES) as error:
        copy.close()
        raise _damaged(path, error) from error
    return copy


def _connect(path: Path) -> sqlite3.Connection:
    try:
        return _begin(path, "mode=ro")
    except sqlite3.OperationalError:
        # Beside a write-ahead log nothing may be called immutable: what it holds would be missed.
        if path.with_name(f"{path.name}-wal").exists():
            raise
        return _begin(path, "mode=ro&immutable=1")


def _begin(path: Path, options: str) -> sqlite3.Connection:
    db = sqlite3.connect(f"file:{quote(str(path.resolve()))}?{options}", timeout=BUSY_S, isolation_level=None, uri=True)
    try:
        _StepBound(_allowed_steps(path)).bound(db)
        db.execute("PRAGMA trusted_schema=OFF")
        # A file without content may have a terabyte, which is no number of SQLite's.
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(max(MIN_VALUE_BYTES, _size(path)), 2**31 - 1))
        db.execute("BEGIN")
        db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
    except UNREADABLE:
        db.close()
        raise
    return db


def _size(path: Path) -> int:
    """Bytes of the file with its log."""
    return sum(part.stat().st_size for part in (path, path.with_name(f"{path.name}-wal")) if part.exists())


def _damaged(path: Path, error: Exception) -> InvalidData:
    return InvalidData(f"{path}: the journal is damaged: {_one_line(error)}")


def _one_line(text: object) -> str:
    """SQLite quotes the file's own bytes, in which a flipped bit may have made a line break."""
    return " ".join(str(text).split())
