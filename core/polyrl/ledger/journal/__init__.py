"""How events and states look in bytes, and what lies in a journal file: marks, SQL text, rows and back.

    snapshot   the state after events 1 .. seq, one row, without what is in pages (`PageBook.rest`)
    pages      tokens of live samples and prompts of live groups, each written once
    events     those after the snapshot, a row per commit, numbered without a hole
    history    the whole run without tokens (see `polyrl.ledger.audit.history`), never deleted
    subjects   which entries of the history concern which sample, group, batch or engine
    meta       the run epoch

Events older than the snapshot are deleted, and with them the tokens of everything acknowledged. What `explain` and
`check` need of them is in the history: a few entries per sample and per assignment, each of a hundred bytes or so, so a
run of a million samples can be audited from its first sample to its last.

A page is what came to one sample since its last page, or a group's prompt; a round of them goes over all that lives,
and the snapshot is taken at its end. So a snapshot costs what is new, not what lives: with 10,000 samples of a few
thousand tokens it would otherwise write hundreds of megabytes again and again. And a round is written a few pages at a
time, between which everybody is served. Pages after the snapshot's `last_page` are of a round that did not end; they
are no part of it. A sample that does not reach its last token is damage.

Every snapshot, page, row of events and entry of the history carries a checksum over its number and its bytes: SQLite
itself would hand a flipped bit on as a token. A journal is read whole or refused. Files are the manager's.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections import deque
from collections.abc import Iterable
from contextlib import closing
from functools import cache
from typing import Final, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from polyrl.errors import ProtocolError
from polyrl.ledger.apply import apply
from polyrl.ledger.events import AnyEvent, Event, GroupSubmitted
from polyrl.ledger.state import GroupState, LedgerState, SampleState

T = TypeVar("T")

JOURNAL_SCHEMA: Final = 9
"""Changes with any change to events or state that old bytes would not survive, or to the history that an audit would
miss. Each change brings a step of `migration`; a journal of a later one, or of one without a step, is refused."""

OLDEST_SCHEMA: Final = 8
"""From which there are steps: that of the last release, or of the one before the first."""

APPLICATION_ID: Final = 0x506F6C79
"""Marks the file as ours ("Poly"); SQLite's own field for that purpose."""

MAX_LIVE_SAMPLES: Final = 1_000_000
"""At once, sixty times a large batch: an event of a hundred bytes may claim any number of them."""

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
REPLACE_EVENTS: Final = "INSERT OR REPLACE INTO events VALUES (?, ?, ?, ?)"
UPDATE_SNAPSHOT: Final = "UPDATE snapshot SET body = ?, checksum = ?"
REPLACE_ENTRY: Final = "INSERT OR REPLACE INTO history VALUES (?, ?)"
DELETE_ENTRY: Final = "DELETE FROM history WHERE number = ?"
DELETE_SUBJECTS: Final = "DELETE FROM subjects WHERE number = ?"
INSERT_PAGE: Final = "INSERT INTO pages VALUES (?, ?, ?, ?)"
INSERT_ENTRY: Final = "INSERT INTO history VALUES (?, ?)"
INSERT_SUBJECT: Final = "INSERT OR IGNORE INTO subjects VALUES (?, ?)"
REPLACE_SNAPSHOT: Final = "INSERT OR REPLACE INTO snapshot VALUES (1, ?, ?, ?, ?, ?)"
DELETE_EVENTS: Final = "DELETE FROM events WHERE seq <= ?"
DELETE_PAGE: Final = "DELETE FROM pages WHERE number = ?"
DELETE_UNFINISHED_ROUND: Final = f"DELETE FROM pages WHERE number > ({SELECT_LAST_PAGE})"

Row = tuple[int, float, bytes, int]
"""seq, at, body, checksum"""

PageRow = tuple[int, str, bytes, int]
"""number (counts up), sample or group, body, checksum; a sample's body is uint32[T] ids, then float32[T] logprobs."""

_encoder = msgspec.msgpack.Encoder()
_events = msgspec.msgpack.Decoder(list[AnyEvent])
_state = msgspec.msgpack.Decoder(LedgerState)


def encode_events(events: Iterable[Event]) -> bytes:
    """The durable ones among `events`; empty bytes when there is none."""
    durable = [event for event in events if event.durable]
    return _encoder.encode(durable) if durable else b""


def decode_events(data: bytes) -> list[Event]:
    """Raises ProtocolError."""
    return _decoded(_events, data, "events")


def encode_state(state: LedgerState) -> bytes:
    """A snapshot, with all that the state holds; a journal writes that of what is not in pages yet."""
    return _encoder.encode(state)


def decode_state(data: bytes) -> LedgerState:
    """Raises ProtocolError."""
    return _decoded(_state, data, "snapshot")


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"undecodable {what}: {error}") from error


class PageBook:
    """Which pages there are, and how far they reach."""

    def __init__(self) -> None:
        self._numbers: dict[str, list[int]] = {}
        """Per sample and group."""
        self._reach: dict[str, int] = {}
        """Per sample: bytes of its ids that are in pages."""
        self._rewinds: dict[str, int] = {}
        """Per sample: its `rewinds` when those were written. Pages of an earlier text are stale."""
        self._stale: list[int] = []
        """Pages that the newest snapshot needs, and the next one does not."""
        self.last = 0
        """Number of the newest page. After a restore the snapshot's: the pages with the highest may have ended."""
        self._round: deque[str] = deque()

    def begin_round(self, state: LedgerState) -> None:
        """Everything that lives gets a page with what no page holds of it."""
        self._round.extend(str(number) for number in state.groups)
        self._round.extend(state.samples)

    @property
    def under_way(self) -> bool:
        """Whether the round has pages left."""
        return bool(self._round)

    def write(self, state: LedgerState, limit: int) -> list[PageRow]:
        """The round's next pages, at most `limit`."""
        rows: list[PageRow] = []
        while self._round and len(rows) < limit:
            name = self._round.popleft()
            body = self._unwritten(state, name)
            if body:
                self.last += 1
                self._numbers.setdefault(name, []).append(self.last)
                rows.append((self.last, name, body, _checksum(self.last, body)))
        return rows

    def _unwritten(self, state: LedgerState, name: str) -> bytes:
        sample = state.samples.get(name)
        if sample is not None:
            self._drop_stale(sample, name)
            reach, self._reach[name] = self._reach.get(name, 0), len(sample.ids)
            return bytes(sample.ids[reach:] + sample.logprobs[reach:])
        entry = _group_of(state, name)
        return b"" if entry is None or name in self._numbers else entry.group.prompt_ids

    def _drop_stale(self, sample: SampleState, name: str) -> None:
        if self._rewinds.get(name, 0) != sample.rewinds:
            self._rewinds[name] = sample.rewinds
            self._stale += self._numbers.pop(name, [])
            self._reach.pop(name, None)

    def rest(self, state: LedgerState) -> LedgerState:
        """`state` without what is in pages; it shares the rest and is only good for being written."""
        groups = {number: self._bare_group(number, entry) for number, entry in state.groups.items()}
        samples = {name: self._bare_sample(name, sample) for name, sample in state.samples.items()}
        return replace(state, groups=groups, samples=samples)

    def _bare_group(self, number: int, entry: GroupState) -> GroupState:
        return replace(entry, group=replace(entry.group, prompt_ids=b"")) if str(number) in self._numbers else entry

    def _bare_sample(self, name: str, sample: SampleState) -> SampleState:
        self._drop_stale(sample, name)
        reach = self._reach.get(name, 0)
        return replace(sample, ids=sample.ids[reach:], logprobs=sample.logprobs[reach:]) if reach else sample

    def forget_ended(self, state: LedgerState) -> list[int]:
        """Numbers of pages whose sample or group no longer lives; they count as deleted from now on."""
        ended = [name for name in self._numbers if name not in state.samples and _group_of(state, name) is None]
        for name in ended:
            self._reach.pop(name, None)
            self._rewinds.pop(name, None)
        stale, self._stale = self._stale, []
        return [*stale, *(number for name in ended for number in self._numbers.pop(name))]

    def restore(self, state: LedgerState, rows: Iterable[PageRow]) -> None:
        """Puts what is in pages back into a state without it, from all its pages in order. Raises ProtocolError for a
        page that is damaged, belongs to nothing, or is missing."""
        bodies: dict[str, list[bytes]] = {}
        for number, name, body, checksum in rows:
            check_row(number, body, checksum, "page")
            self._numbers.setdefault(name, []).append(number)
            bodies.setdefault(name, []).append(body)
        for name, pieces in bodies.items():
            if name in state.samples:
                self._reach[name] = _put_before(state.samples[name], pieces)
                self._rewinds[name] = state.samples[name].rewinds
            else:
                _give_prompt(state, name, pieces[0])
        _check_whole(state)


def _put_before(sample: SampleState, bodies: list[bytes]) -> int:
    """Returns the bytes of ids that were put."""
    ids = bytearray().join(body[: len(body) // 2] for body in bodies)
    logprobs = bytearray().join(body[len(body) // 2 :] for body in bodies)
    reach = len(ids)
    sample.ids, sample.logprobs = ids + sample.ids, logprobs + sample.logprobs
    return reach


def _give_prompt(state: LedgerState, name: str, prompt: bytes) -> None:
    entry = _group_of(state, name)
    if entry is None:
        raise ProtocolError(f"a page belongs to {name[:64]!r}, which is neither a live sample nor a live group")
    entry.group = replace(entry.group, prompt_ids=prompt)


def _group_of(state: LedgerState, name: str) -> GroupState | None:
    return state.groups.get(int(name)) if name.isascii() and name.isdigit() else None


def _check_whole(state: LedgerState) -> None:
    for number, entry in state.groups.items():
        if not entry.group.prompt_ids:
            raise ProtocolError(f"the prompt of group {number} is missing")
    for name, sample in state.samples.items():
        length = sample.spans[-1].end if sample.spans else 0
        if not len(sample.ids) == len(sample.logprobs) == 4 * length:
            raise ProtocolError(f"sample {name} has {sample.length} of its {length} tokens")


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
    if not OLDEST_SCHEMA <= schema <= JOURNAL_SCHEMA:
        return f"is of journal schema {schema}, this version reads {OLDEST_SCHEMA} to {JOURNAL_SCHEMA}"
    if _definitions(db) != _our_definitions():
        return "has other tables than a journal"
    return ""


def _definitions(db: sqlite3.Connection) -> set[tuple[str, ...]]:
    """Kind, name and SQL of all in a file: a received one may have views by our tables' names, computing for ever."""
    rows = db.execute("SELECT type, name, coalesce(sql, '') FROM sqlite_master")
    return {(kind, name, " ".join(sql.split())) for kind, name, sql in rows}


@cache
def _our_definitions() -> set[tuple[str, ...]]:
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(CREATE)
        return _definitions(db)


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
    check_row(seq, body, checksum, "snapshot")
    state, tail, book = decode_state(body), 0, PageBook()
    book.restore(state, pages)
    for number, when, packed, packed_checksum in events:
        if number != seq + 1:
            raise ProtocolError(f"row {seq + 1} of the events is missing")
        check_row(number, packed, packed_checksum, "row of events")
        _fold_all(state, packed, number)
        seq, at, tail = number, when, tail + len(packed)
    return Replayed(state, at, seq=seq, snapshot_bytes=len(body), tail_bytes=tail, pages=book)


def _fold_all(state: LedgerState, packed: bytes, number: int) -> None:
    try:
        for event in decode_events(packed):
            if isinstance(event, GroupSubmitted) and len(state.samples) + event.group.n > MAX_LIVE_SAMPLES:
                raise ProtocolError(f"row {number} of the events: more than {MAX_LIVE_SAMPLES:,} samples live at once")
            apply(state, event)
    except (KeyError, ValueError, IndexError) as error:
        raise ProtocolError(f"row {number} of the events does not follow from what is before it: {error!r}") from error


def check_row(seq: int, body: bytes, checksum: int, what: str) -> None:
    """Raises ProtocolError when the row is not as it was written."""
    if _checksum(seq, body) != checksum:
        raise ProtocolError(f"the checksum of {what} {seq} does not match")


def _checksum(seq: int, body: bytes) -> int:
    return zlib.crc32(body, seq & 0xFFFFFFFF)
