"""The journal: each durable event in SQLite (WAL) before a message that depends on it leaves, a transaction per batch.

Restart costs what lives: once the tail outgrows SNAPSHOT_TAIL_BYTES a snapshot of the state replaces it, and with it go
the tokens of everything acknowledged. A snapshot writes only tokens that none before has written. The history of
each sample (`polyrl.ledger.audit.history`) stays for `explain`, `check`.

A commit outlives this process; `sync` makes all commits so far outlive the machine (group commit: it may run in another
thread while commits go on). A power cut takes the newest commits that were not synced, never half of one; which
messages wait for it says `polyrl.ledger.journal.durability`. SQLite itself (`synchronous=NORMAL`) syncs only where the
order of writes needs it, in checkpoints.

One writer: it holds a lock file for the life of the process. Any number of readers in other processes: in WAL mode they
neither block it nor see half a transaction.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import IO, Final

from polyrl.errors import InvalidData, ProtocolError, RunFailed
from polyrl.ledger import journal as form
from polyrl.ledger.audit.history import HistoryEntry, HistoryProjection, ManagerStarted, encode_entry, subjects_of
from polyrl.ledger.events import Event
from polyrl.ledger.journal import PageBook, PageRow, encode_events, encode_state
from polyrl.ledger.journal.migration import migrate
from polyrl.ledger.state import LedgerState

SNAPSHOT_TAIL_BYTES: Final = 16 << 20
"""Events after the newest snapshot, at least; replaying 16 MiB takes about a second."""
SNAPSHOT_RATIO: Final = 4
"""And at least this many times the last snapshot's size, so that snapshots stay a fraction of what is written."""
PAGES_PER_COMMIT: Final = 64
"""Less than a millisecond, while frames wait."""
LOCK_DEADLINE_S: Final = 5.0
"""A predecessor that was killed lets go of its lock at once; one that lives does not, and we must not wait for it."""
LOCK_POLL_S: Final = 0.05
"""Between two tries to lock; flock itself knows no deadline."""


class Journal:
    """One open journal file. Raises RunFailed when it cannot be written: what is not safe must not be sent."""

    def __init__(self, path: Path, run_epoch: int) -> None:
        """Opens or creates. Raises InvalidData naming what is wrong with a file that is not ours, or is damaged, and
        RunFailed when the folder takes no file or another process writes the journal."""
        self.path = path
        self._run_epoch = run_epoch
        self._pending: list[Event] = []
        self._entries: list[HistoryEntry] = []
        self._projection: HistoryProjection | None = None
        self._last_entry = 0
        self._pages = PageBook()
        self._in_round = False
        self._tail_bytes = 0
        self._snapshot_bytes = 0
        self._seq = 0
        self._failed: RunFailed | None = None
        self._syncing = Lock()
        self.commits = 0
        """Transactions with something new, in this incarnation."""
        self.synced = 0
        """How many of `commits` a power cut cannot take back."""
        with ExitStack() as opened:
            self._lock = opened.enter_context(_locked(path))
            try:
                self._db = sqlite3.connect(path, timeout=LOCK_DEADLINE_S, isolation_level=None)
                opened.callback(self._db.close)
                self._open()
                self._log = opened.enter_context(path.with_name(f"{path.name}-wal").open("rb"))
            except (sqlite3.OperationalError, OSError) as error:
                raise RunFailed(f"{path}: the journal cannot be opened for writing: {error}") from error
            except sqlite3.Error as error:
                raise InvalidData(f"{path}: not a usable journal: {error}") from error
            opened.pop_all()

    def restore(self) -> tuple[LedgerState | None, float]:
        """The state as it was, and the ledger's clock at its end; (None, 0) for a new journal.

        Raises InvalidData when the journal is of another epoch, or damaged.
        """
        try:
            kept = self._db.execute(form.SELECT_EPOCH).fetchone()
            if kept is None or int(kept[0]) != self._run_epoch:
                raise InvalidData(f"{self.path}: holds run epoch {kept and kept[0]}, this is epoch {self._run_epoch}")
            snapshot = self._db.execute(form.SELECT_SNAPSHOT).fetchone()
            events, pages = (self._db.execute(query) for query in (form.SELECT_EVENTS, form.SELECT_PAGES))
            replayed = form.replay(snapshot, events, pages)
        except (sqlite3.Error, ProtocolError, ValueError) as error:
            raise InvalidData(f"{self.path}: the journal is damaged and cannot be replayed: {error}") from error
        if replayed is None:
            return None, 0.0
        self._seq, self._snapshot_bytes, self._tail_bytes = replayed.seq, replayed.snapshot_bytes, replayed.tail_bytes
        self._pages = replayed.pages
        (self._pages.last,) = self._db.execute(form.SELECT_LAST_PAGE).fetchone()
        return replayed.state, replayed.at

    def begin(self, state: LedgerState, at: float) -> None:
        """Starts an incarnation: `state` is what the coming events change, `at` the ledger's clock now."""
        self._in_transaction(lambda: self._db.execute(form.DELETE_UNFINISHED_ROUND))
        self._projection = HistoryProjection(state)
        self._entries.append(HistoryEntry(at, ManagerStarted(time.time(), state.config)))
        self.commit(state, at)
        if not self._seq:
            self._snapshot(state, at)

    def append(self, events: Sequence[Event]) -> None:
        """Gathers events, and what the history keeps of them, for the next commit."""
        assert self._projection is not None, "begin() comes first"
        self._pending.extend(events)
        for event in events:
            self._entries.extend(self._projection.project(event))

    def commit(self, state: LedgerState, at: float) -> None:
        """One transaction with all that was gathered; `state` is the ledger's, after it.

        Raises RunFailed when the disk does not take it, and from then on always: with an empty commit that succeeds,
        what was to be said only after the lost one would be said.
        """
        if self._failed is not None:
            raise self._failed
        body = encode_events(self._pending)
        self._pending.clear()
        if not body and not self._entries:
            return
        entries = list(enumerate(self._entries, self._last_entry + 1))
        self._last_entry += len(entries)
        self._entries.clear()
        pages = self._pages.write(state, PAGES_PER_COMMIT)
        self._in_transaction(lambda: self._insert(body, at, entries, pages))
        self.commits += 1
        self._tail_bytes += len(body)
        self._advance(state, at)

    def sync(self) -> None:
        """Returns once all commits before this call are on the disk; `commit` may be called meanwhile.

        A commit that is no longer in the log was moved to the file by a checkpoint, which syncs both. Raises RunFailed
        when the disk fails, and from then on always: the system may have dropped what it could not write, so that a
        second try would succeed without it.
        """
        # One at a time: the system says once that it lost something, and not to the other of two that ask at once.
        with self._syncing:
            if self._failed is not None:
                raise self._failed
            commits = self.commits
            try:
                os.fdatasync(self._log.fileno())
            except OSError as error:
                self._failed = RunFailed(f"{self.path}: the journal cannot be written: {error.strerror}")
                raise self._failed from error
            self.synced = max(self.synced, commits)

    def _advance(self, state: LedgerState, at: float) -> None:
        """A long tail begins a round of pages, the end of a round a snapshot."""
        if self._in_round:
            if not self._pages.under_way:
                self._snapshot(state, at)
        elif self._tail_bytes > max(SNAPSHOT_TAIL_BYTES, SNAPSHOT_RATIO * self._snapshot_bytes):
            self._in_round = True
            self._pages.begin_round(state)

    def close(self) -> None:
        """Lets go of the file. What was not committed is dropped: nobody has seen it."""
        self._log.close()
        self._db.close()
        self._lock.close()

    def _insert(self, body: bytes, at: float, entries: list[tuple[int, HistoryEntry]], pages: list[PageRow]) -> None:
        if body:
            self._seq += 1
            self._db.execute(form.INSERT_EVENTS, form.row(self._seq, at, body))
        self._db.executemany(form.INSERT_ENTRY, ((number, encode_entry(number, entry)) for number, entry in entries))
        subjects = ((subject, number) for number, entry in entries for subject in subjects_of(entry))
        self._db.executemany(form.INSERT_SUBJECT, subjects)
        self._db.executemany(form.INSERT_PAGE, pages)

    def _in_transaction(self, write: Callable[[], object]) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            write()
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._failed = RunFailed(f"{self.path}: the journal cannot be written: {error}")
            raise self._failed from error

    def _snapshot(self, state: LedgerState, at: float) -> None:
        snapshot = form.row(self._seq, at, encode_state(self._pages.rest(state)))
        ended = self._pages.forget_ended(state)
        self._in_transaction(lambda: self._replace((*snapshot, self._pages.last), ended))
        self._tail_bytes, self._snapshot_bytes, self._in_round = 0, len(snapshot[2]), False

    def _replace(self, snapshot: tuple[int, float, bytes, int, int], ended: list[int]) -> None:
        self._db.execute(form.REPLACE_SNAPSHOT, snapshot)
        self._db.executemany(form.DELETE_PAGE, ((number,) for number in ended))
        self._db.execute(form.DELETE_EVENTS, (self._seq,))

    def _open(self) -> None:
        """A file without a table is new, or a creation that was killed: it is filled in one transaction, before WAL."""
        (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables:
            if problem := form.foreign(self._db):
                raise InvalidData(f"{self.path}: {problem}")
            try:
                migrate(self._db)
            except ProtocolError as error:
                raise InvalidData(f"{self.path}: the journal is damaged and cannot be migrated: {error}") from error
        else:
            self._db.executescript(form.create_script(self._run_epoch))
        (self._last_entry,) = self._db.execute(form.SELECT_LAST_ENTRY).fetchone()
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        # What a predecessor committed and a failed sync left in the system's cache alone is written, and synced, anew.
        self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        # Some builds of SQLite overwrite with zeros what is deleted, and so write everything twice.
        self._db.execute("PRAGMA secure_delete=OFF")


class RevokedNames:
    """Engines whose pods are gone: their proofs count no longer. Kept beside the journal, so that a manager that is
    started again refuses them as well; a name is added and never taken out, for no second pod has it. Without a path
    they last as long as the process."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._kept: set[str] = set()
        if path is not None and path.exists():
            # A line that a crash cut off is the beginning of a name, which may be another's.
            whole, end, _ = path.read_text().rpartition("\n")
            os.truncate(path, len(whole + end))
            self._kept = set(whole.splitlines())
        self._names = set(self._kept)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> None:
        """Refused from now on, and kept once this returns. Raises OSError; whoever asks again has it tried again."""
        self._names.add(name)
        if self._path is None or name in self._kept:
            return
        with self._path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(line := f"{name}\n".encode()) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError:
                # Half of a line would be the beginning of the next name.
                os.truncate(self._path, size)
                raise
        if not size:
            _sync_folder(self._path.parent)
        self._kept.add(name)


def _make_folder(folder: Path) -> None:
    """With all above it, so that none is gone after a power cut."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """What was created in it stays in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _locked(path: Path) -> IO[str]:
    """The lock file beside the journal, locked until closed or until this process ends. Raises RunFailed."""
    try:
        _make_folder(path.parent)
        file = path.with_name(f"{path.name}.lock").open("a")
    except OSError as error:
        raise RunFailed(f"{path}: the journal cannot be written here: {error.strerror}") from error
    deadline = time.monotonic() + LOCK_DEADLINE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                file.close()
                raise RunFailed(f"{path}: another process writes this journal") from None
            time.sleep(LOCK_POLL_S)
        else:
            return file
