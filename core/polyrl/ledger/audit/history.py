"""The history of a run: its events without tokens, kept from the first sample to the last.

A journal drops events, and tokens with them, once a snapshot holds what still matters. `HistoryProjection` turns each
event into what stays: most as they are; prompts and environments' tokens as a count; the token frames of an assignment
as one `AssignmentTokens` when it ends, so that the history grows with assignments and not with tokens; signs of life as
the last one of an engine, when it is gone. An audit reads it (see `audit`), and so does `polyrl explain`.

In bytes an entry is MessagePack with its number and checksum: SQLite would hand on a flipped bit as history.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Final, TypeAlias

import msgspec

from polyrl.ledger import events as f
from polyrl.ledger.config import LedgerConfig
from polyrl.ledger.state import LedgerState, SampleState
from polyrl.sample import ENVIRONMENT_VERSION, split_sample_id
from polyrl.wire import row_columns

CHECKSUM_BYTES: Final = 4

RUN: Final = "run"
"""Subject of entries that concern nothing smaller."""

ID_BYTES: Final = 4
"""Size of a uint32 token id."""

Piece: TypeAlias = tuple[int, int, int]
"""Response positions start <= p < end, and the weight version that made them."""


class ManagerStarted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A manager process took the run up, at its beginning or after a restart."""

    unix_s: float
    config: LedgerConfig


class AssignmentTokens(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What an assignment has generated, without the ids: one piece per unbroken stretch of one version, so a gap or an
    overlap still shows. Written before the event that ends the assignment, or at once for one that does not run."""

    assignment: int
    pieces: list[Piece]


HistoryEvent: TypeAlias = f.AnyEvent | ManagerStarted | AssignmentTokens


class HistoryEntry(msgspec.Struct, frozen=True, array_like=True):
    """One thing that happened, at `at` on the ledger's clock."""

    at: float
    event: HistoryEvent
    tokens: int = 0
    """How many tokens a prompt or an environment wrote; their ids are left out of the event."""
    sample: str = ""
    """The sample of an event that names only an assignment."""


@dataclass(slots=True)
class _TokenStream:
    """What one running assignment has brought so far."""

    sample: str
    closed: list[Piece] = field(default_factory=list)
    start: int = 0
    end: int = -1
    """Where the piece that may still grow ends; -1: there is none."""
    version: int = ENVIRONMENT_VERSION

    def begin_piece(self, offset: int, count: int, version: int) -> None:
        """Starts a new piece: the tokens leave a gap, overlap, or have another version."""
        self.closed = self.pieces
        self.start, self.end, self.version = offset, offset + count, version

    @property
    def pieces(self) -> list[Piece]:
        return self.closed if self.end < 0 else [*self.closed, (self.start, self.end, self.version)]


class HistoryProjection:
    """Turns events into history. The ledger's state is read once, for what is under way when a manager starts; after
    that events alone count, so an audit of the history can find a fault in how the ledger applies them."""

    def __init__(self, state: LedgerState) -> None:
        """`state`: the ledger's, as it is before the first event that will be projected."""
        self._streams = {number: _under_way(state, number) for number in state.assignments}
        self._assignments: dict[int, dict[str, int]] = {}
        """Running assignments, by group and sample."""
        for number, stream in self._streams.items():
            self._assignments.setdefault(_group_of(stream.sample), {})[stream.sample] = number
        self._heard = {name: engine.heard_at for name, engine in state.engines.items()}
        self._at = _newest(state)
        """Time of the newest timestamped event; events without a time get this one."""

    def project(self, event: f.Event) -> Iterable[HistoryEntry]:
        """The entries of the next event, durable or not; mostly none."""
        if not isinstance(event, f.LeasesRenewed):  # which may speak of the future
            self._at = getattr(event, "at", self._at)
        projection = _PROJECTIONS.get(type(event))
        if projection is not None:
            return projection(self, event)
        return self._as_it_is(event) if event.durable and not isinstance(event, _LEFT_OUT) else ()

    def _as_it_is(self, event: f.Event) -> Iterable[HistoryEntry]:
        return (HistoryEntry(self._at, event),)

    def _renewed(self, event: f.LeasesRenewed) -> Iterable[HistoryEntry]:
        self._heard = {name: max(at, event.at) for name, at in self._heard.items()}
        return (HistoryEntry(event.at, event),)

    def _engine_heard(self, event: f.EngineHeard) -> Iterable[HistoryEntry]:
        self._heard[event.engine] = event.at
        return ()

    def _engine_silent(self, event: f.EngineSilent) -> Iterable[HistoryEntry]:
        return self._last_sign(event.engine), HistoryEntry(self._at, event)

    def _last_sign(self, engine: str) -> HistoryEntry:
        heard_at = self._heard.get(engine, -inf)
        return HistoryEntry(heard_at, f.EngineHeard(engine, heard_at))

    def _engine_returned(self, event: f.EngineReturned) -> Iterable[HistoryEntry]:
        self._heard[event.engine] = event.at
        return self._as_it_is(event)

    def _engine_greeted_again(self, event: f.EngineGreetedAgain) -> Iterable[HistoryEntry]:
        self._heard[event.engine] = event.at
        return ()

    def _engine_greeted(self, event: f.EngineGreeted) -> Iterable[HistoryEntry]:
        self._heard[event.engine] = event.at
        return self._as_it_is(event)

    def _engine_gone(self, event: f.EngineGone) -> Iterable[HistoryEntry]:
        last_sign = self._last_sign(event.engine)
        self._heard.pop(event.engine, None)
        return last_sign, HistoryEntry(self._at, event)

    def _tokens_taken(self, event: f.TokensTaken) -> Iterable[HistoryEntry]:
        self._heard[event.engine] = event.at
        numbers, offsets, counts, _ = row_columns(event.rows)
        streams, version, strays = self._streams, event.version, []
        for number, offset, count in zip(numbers, offsets, counts, strict=True):
            if not count:
                continue
            stream = streams.get(number)
            if stream is None:
                strays.append(HistoryEntry(event.at, AssignmentTokens(number, [(offset, offset + count, version)])))
            elif stream.end == offset and stream.version == version:
                stream.end += count
            else:
                stream.begin_piece(offset, count, version)
        return strays

    def _assigned(self, event: f.Assigned) -> Iterable[HistoryEntry]:
        self._streams[event.assignment] = _TokenStream(event.sample)
        self._assignments.setdefault(_group_of(event.sample), {})[event.sample] = event.assignment
        return self._as_it_is(event)

    def _reclaimed(self, event: f.Reclaimed) -> Iterable[HistoryEntry]:
        ended = self._end(event.sample)
        self._streams[event.assignment] = _TokenStream(event.sample)
        self._assignments.setdefault(_group_of(event.sample), {})[event.sample] = event.assignment
        return [*ended, *self._as_it_is(event)]

    def _moved(self, event: f.Moved) -> Iterable[HistoryEntry]:
        stream = self._streams.get(event.assignment)
        sample = "" if stream is None else stream.sample
        return [*self._end(sample), HistoryEntry(self._at, event, sample=sample)]

    def _turn_ended(self, event: f.TurnEnded) -> Iterable[HistoryEntry]:
        return [*self._end(event.sample), HistoryEntry(self._at, event)]

    def _group_discarded(self, event: f.GroupDiscarded) -> Iterable[HistoryEntry]:
        running = tuple(self._assignments.get(event.group, ()))
        return [*(entry for sample in running for entry in self._end(sample)), HistoryEntry(self._at, event)]

    def _end(self, sample: str) -> list[HistoryEntry]:
        """The assignment of a sample ends, if one runs; its tokens, if it brought any."""
        group = _group_of(sample)
        number = self._assignments.get(group, {}).pop(sample, None)
        if number is None:
            return []
        if not self._assignments[group]:
            del self._assignments[group]
        pieces = self._streams.pop(number).pieces
        return [HistoryEntry(self._at, AssignmentTokens(number, pieces), sample=sample)] if pieces else []

    def _group_submitted(self, event: f.GroupSubmitted) -> Iterable[HistoryEntry]:
        bare = f.GroupSubmitted(msgspec.structs.replace(event.group, prompt_ids=b""), event.at)
        return (HistoryEntry(event.at, bare, tokens=len(event.group.prompt_ids) // ID_BYTES),)

    def _turn_extended(self, event: f.TurnExtended) -> Iterable[HistoryEntry]:
        return (HistoryEntry(event.at, msgspec.structs.replace(event, ids=b""), tokens=len(event.ids) // ID_BYTES),)


_LEFT_OUT: Final = (f.StepEnded, f.DropsKnown, f.Reported, f.RequestDone, f.DrainExpired)
"""Durable events that say nothing of a sample; all others are kept."""

_PROJECTIONS: Final[dict[type, Callable[[HistoryProjection, Any], Iterable[HistoryEntry]]]] = {
    f.LeasesRenewed: HistoryProjection._renewed,
    f.EngineHeard: HistoryProjection._engine_heard,
    f.EngineGreeted: HistoryProjection._engine_greeted,
    f.EngineGreetedAgain: HistoryProjection._engine_greeted_again,
    f.EngineSilent: HistoryProjection._engine_silent,
    f.EngineReturned: HistoryProjection._engine_returned,
    f.EngineGone: HistoryProjection._engine_gone,
    f.TokensTaken: HistoryProjection._tokens_taken,
    f.Assigned: HistoryProjection._assigned,
    f.Moved: HistoryProjection._moved,
    f.Reclaimed: HistoryProjection._reclaimed,
    f.TurnEnded: HistoryProjection._turn_ended,
    f.TurnExtended: HistoryProjection._turn_extended,
    f.GroupSubmitted: HistoryProjection._group_submitted,
    f.GroupDiscarded: HistoryProjection._group_discarded,
}

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[HistoryEntry] = msgspec.msgpack.Decoder(HistoryEntry)


def subjects_of(entry: HistoryEntry) -> list[str]:
    """What an entry is filed under: a sample `12.3`, a group `12`, `batch 5`, `engine rollout-0`, or the run."""
    event = entry.event
    match event:
        case f.Assigned() | f.Reclaimed() | f.TurnEnded() | f.TurnExtended() | f.SampleScored():
            return [event.sample]
        case f.Moved() | AssignmentTokens():
            return [entry.sample]
        case f.GroupSubmitted():
            return [str(event.group.id)]
        case f.GroupCompleted() | f.GroupDiscarded():
            return [str(event.group)]
        case f.BatchPacked():
            return [batch_subject(event.batch), *map(str, event.groups)]
        case f.BatchAcknowledged() | f.BatchReturned() | f.BatchReleased():
            return [batch_subject(event.batch)]
        case f.EngineGreeted() | f.EngineHeard() | f.EngineServing() | f.EngineGone():
            return [engine_subject(event.engine)]
        case f.EngineQuarantined() | f.EngineDraining() | f.EngineSilent() | f.EngineReturned() | f.EngineDeparted():
            return [engine_subject(event.engine)]
    return [RUN]


def batch_subject(batch: int) -> str:
    """What entries of a batch are filed under."""
    return f"batch {batch}"


def engine_subject(engine: str) -> str:
    """What entries of an engine are filed under."""
    return f"engine {engine}"


def encode_entry(number: int, entry: HistoryEntry) -> bytes:
    """As MessagePack, and the CRC-32 of that and its number."""
    body = _encoder.encode(entry)
    return body + zlib.crc32(body, number & 0xFFFFFFFF).to_bytes(CHECKSUM_BYTES)


def decode_entry(number: int, data: bytes) -> HistoryEntry:
    """Raises ValueError when it is none."""
    body, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    if zlib.crc32(body, number & 0xFFFFFFFF).to_bytes(CHECKSUM_BYTES) != checksum:
        raise ValueError(f"the checksum of entry {number} of the history does not match")
    return _decoder.decode(body)


def pieces_of(sample: SampleState) -> list[Piece]:
    """What the running assignment of a sample has generated so far."""
    ours = (span for span in sample.spans if span.attempt == sample.attempt and span.version != ENVIRONMENT_VERSION)
    return [(span.start, span.end, span.version) for span in ours]


def _newest(state: LedgerState) -> float:
    """The newest moment in a state; 0 for one in which nothing has happened."""
    moments = [pending.since for pending in state.pending.values()]
    moments += [sample.since for sample in state.samples.values()]
    return max((moment for moment in moments if isfinite(moment)), default=0.0)


def _under_way(state: LedgerState, number: int) -> _TokenStream:
    sample = state.assignments[number].sample
    stream = _TokenStream(sample)
    for start, end, version in pieces_of(state.samples[sample]):
        stream.begin_piece(start, end - start, version)
    return stream


def _group_of(sample: str) -> int:
    try:
        return split_sample_id(sample)[0]
    except ValueError:
        return -1
