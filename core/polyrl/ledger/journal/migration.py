"""A journal of an earlier schema becomes one of this version: a step per schema, pure functions from old rows to new.

    schema 8 --STEPS[8]--> schema 9 --STEPS[9]--> ...        all in one transaction, or nothing

Appended fields with defaults need no function: the bytes of before lack them, and decoding fills them in. Fields that
are gone from a struct with names are passed over. So most steps are about what is gone, or means something else. A step
knows the bytes of its two schemas, not today's classes, which later steps change: it sees plain lists and dicts. Steps
since the last release are kept; so a manager of the next minor version takes over a live run.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from polyrl.errors import ProtocolError
from polyrl.ledger import journal as form
from polyrl.ledger.audit.history import CHECKSUM_BYTES


def _same(value: Any) -> Any:
    return value


class Step(NamedTuple):
    """From one schema to the next."""

    what: str
    """Changed, in a sentence."""
    event: Callable[[list[Any]], list[Any] | None] = _same
    """One event, [tag, field, ...], in rows of events and in the history; None: it is left out."""
    state: Callable[[dict[str, Any]], dict[str, Any]] = _same
    """The snapshot."""

    @property
    def rewrites(self) -> bool:
        """Whether any bytes change; otherwise only the schema's number does."""
        return self.event is not _same or self.state is not _same


def is_old(db: sqlite3.Connection) -> bool:
    """Whether there is anything to migrate."""
    (schema,) = db.execute("PRAGMA user_version").fetchone()
    return bool(schema < form.JOURNAL_SCHEMA)


def migrate(db: sqlite3.Connection) -> None:
    """Brings a journal that is not `foreign` to JOURNAL_SCHEMA, in one transaction; one that is there stays untouched.

    Raises ProtocolError for damage, and sqlite3.Error; the file is as before then.
    """
    if not is_old(db):
        return
    (schema,) = db.execute("PRAGMA user_version").fetchone()
    db.execute("BEGIN IMMEDIATE")
    try:
        for number in range(schema, form.JOURNAL_SCHEMA):
            if STEPS[number].rewrites:
                _take_step(db, STEPS[number])
        db.execute(f"PRAGMA user_version={form.JOURNAL_SCHEMA}")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def _take_step(db: sqlite3.Connection, step: Step) -> None:
    for seq, at, body, checksum in db.execute(form.SELECT_EVENTS).fetchall():
        form.check_row(seq, body, checksum, what="row of events")
        events = [new for old in _decode(body) if (new := step.event(old)) is not None]
        db.execute(form.REPLACE_EVENTS, form.row(seq, at, _encoder.encode(events)))
    for seq, at, body, checksum in db.execute(form.SELECT_SNAPSHOT).fetchall():
        form.check_row(seq, body, checksum, what="snapshot")
        fresh = form.row(seq, at, _encoder.encode(step.state(_decode(body))))
        db.execute(form.UPDATE_SNAPSHOT, fresh[2:])
    for number, data in db.execute(form.SELECT_HISTORY).fetchall():
        _rewrite_entry(db, step, number, data)


def _rewrite_entry(db: sqlite3.Connection, step: Step, number: int, data: bytes) -> None:
    body, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    form.check_row(number, body, int.from_bytes(checksum), what="entry of the history")
    at, old, *rest = _decode(body)
    new = step.event(old)
    if new is None:
        db.execute(form.DELETE_ENTRY, (number,))
        db.execute(form.DELETE_SUBJECTS, (number,))
    elif new != old:
        fresh = _encoder.encode([at, new, *rest])
        db.execute(
            form.REPLACE_ENTRY, (number, fresh + zlib.crc32(fresh, number & 0xFFFFFFFF).to_bytes(CHECKSUM_BYTES))
        )


def _decode(body: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"undecodable row: {error}") from error


_encoder = msgspec.msgpack.Encoder()


# --- 8 to 9 -----------------------------------------------------------------------------------------------------------


def _no_stragglers(event: list[Any]) -> list[Any] | None:
    """Slow engines are compared by cost like all others: none is a straggler, and none is restored from being one."""
    match event:
        case ["EngineRestored", *_]:
            return None
        case ["Moved", assignment, "straggler", at]:
            return ["Moved", assignment, "rebalanced", at]
        case ["EngineQuarantined", engine, until, "straggler", at]:
            return ["EngineQuarantined", engine, until, "stalled", at]
    return event


def _state_of_9(state: dict[str, Any]) -> dict[str, Any]:
    for assignment in state["assignments"].values():
        if assignment[_RECALL_CAUSE] == "straggler":
            assignment[_RECALL_CAUSE] = "rebalanced"
    steps = {number: entry[0][_STEP] for number, entry in state["groups"].items()}
    state["queue"] = sorted([first, steps[number], number] for first, number in state["queue"])
    present = [e for e in state["engines"].values() if e["version"] >= 0 and not e["draining"]]
    may = [engine for engine in present if state["window_open"] or engine["pool"] != "reserved"]
    state["usage"] = {"present": len(may)}
    return state


_STEP: Final = 1
"""Place of `step` in a Group of schema 8."""

_RECALL_CAUSE: Final = 10
"""Place of `recall_cause` in an Assignment of schema 8."""

STEPS: Final[dict[int, Step]] = {
    8: Step(
        "no engine is a straggler; the queue goes by step before age; engines that can generate are counted",
        event=_no_stragglers,
        state=_state_of_9,
    )
}
"""By the schema that they start from; none is missing between the oldest and JOURNAL_SCHEMA."""
