"""The historian: events in, records out (see `records`). What it tells outlives the tokens.

A journal forgets events once a snapshot holds what still matters of them; records stay, a few hundred bytes per sample.
They come from events alone. The ledger's state is read once, when an incarnation begins, for what is under way then:
so an audit of the records can find a fault of the ledger's fold.

Refuses to hold: tokens, files (see whoever keeps the journal), judgement (see `audit`). Read next: `audit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Final

from polyrl.ledger import events as f
from polyrl.ledger.audit import records as r
from polyrl.ledger.state import ENVIRONMENT_VERSION, LedgerState
from polyrl.sample import sample_id
from polyrl.wire import row_columns

BYTES_PER_TOKEN: Final = 4
"""Of a uint32 token id."""


@dataclass(slots=True)
class _Stream:
    """What one running assignment has brought so far."""

    sample: str
    engine: str
    closed: list[r.Piece] = field(default_factory=list)
    start: int = 0
    end: int = -1
    """Of the piece that may still grow; -1: there is none."""
    version: int = ENVIRONMENT_VERSION

    def begin_piece(self, offset: int, count: int, version: int) -> None:
        """What comes does not go on where we are, or is of another version."""
        self.closed = self.pieces
        self.start, self.end, self.version = offset, offset + count, version

    @property
    def pieces(self) -> list[r.Piece]:
        return self.closed if self.end < 0 else [*self.closed, (self.start, self.end, self.version)]


class Historian:
    """Turns events into records. Holds what is under way: running assignments, group sizes, who was heard when."""

    def __init__(self, state: LedgerState) -> None:
        """`state`: the ledger's, as it is before the first event that will be told."""
        self._sizes = {number: entry.group.n for number, entry in state.groups.items()}
        self._streams = {number: _under_way(state, number) for number in state.assignments}
        self._assignments = {stream.sample: number for number, stream in self._streams.items()}
        self._versions = {name: engine.version for name, engine in state.engines.items()}
        self._heard = {name: engine.heard_at for name, engine in state.engines.items()}
        self._asked = {number: (entry.since, entry.due) for number, entry in state.pending.items()}
        self._at = _newest(state)
        """The newest moment that an event told; events without one happened then or a little later."""

    def tell(self, event: f.Event) -> Iterable[r.AnyRecord]:
        """The records of the next event, durable or not; mostly none."""
        teller = _TELLERS.get(type(event))
        return () if teller is None else teller(self, event)

    # --- the run ------------------------------------------------------------------------------------------------------

    def _renewed(self, event: f.LeasesRenewed) -> Iterable[r.AnyRecord]:
        self._heard = {name: max(at, event.at) for name, at in self._heard.items()}
        return (r.Renewed(event.at),)

    def _asked_for(self, event: f.BatchRequested) -> Iterable[r.AnyRecord]:
        self._at = event.at
        self._asked[event.request.request] = (event.at, event.at + event.request.deadline_s)
        return ()

    def _closed(self, event: f.BatchRequestClosed) -> Iterable[r.AnyRecord]:
        since, due = self._asked.pop(event.request, (self._at, inf))
        return (r.Unanswered(self._at, event.request, since, due),)

    def _trainer_heard(self, event: f.TrainerHeard) -> Iterable[r.AnyRecord]:
        self._at = event.at
        return ()

    # --- engines ------------------------------------------------------------------------------------------------------

    def _greeted(self, event: f.EngineGreeted) -> Iterable[r.AnyRecord]:
        self._heard[event.engine] = event.at
        self._versions[event.engine] = event.version
        return (r.Greeted(event.at, event.engine, event.pool, event.max_running, event.version),)

    def _heard_of(self, event: f.EngineHeard) -> Iterable[r.AnyRecord]:
        self._heard[event.engine] = self._at = event.at
        return ()

    def _serving(self, event: f.EngineServing) -> Iterable[r.AnyRecord]:
        self._versions[event.engine] = event.version
        return (r.Serving(event.at, event.engine, event.version),)

    def _gone(self, event: f.EngineGone) -> Iterable[r.AnyRecord]:
        self._versions.pop(event.engine, None)
        return (r.Gone(event.at, event.engine, event.cause, self._heard.pop(event.engine, -inf)),)

    # --- tokens -------------------------------------------------------------------------------------------------------

    def _tokens(self, event: f.TokensTaken) -> Iterable[r.AnyRecord]:
        self._heard[event.engine] = self._at = event.at
        numbers, offsets, counts, _ = row_columns(event.rows)
        streams, version, strays = self._streams, event.version, []
        for number, offset, count in zip(numbers, offsets, counts, strict=True):
            if not count:
                continue
            stream = streams.get(number)
            if stream is None:
                strays.append(r.Stray(event.at, number, count))
            elif stream.end == offset and stream.version == version:
                stream.end += count
            else:
                stream.begin_piece(offset, count, version)
        return strays

    def _assigned(self, event: f.Assigned) -> Iterable[r.AnyRecord]:
        self._streams[event.assignment] = _Stream(event.sample, event.engine)
        self._assignments[event.sample] = event.assignment
        version = self._versions.get(event.engine, ENVIRONMENT_VERSION)
        return (r.Assigned(event.at, event.sample, event.assignment, event.engine, version),)

    def _moved(self, event: f.Moved) -> Iterable[r.AnyRecord]:
        stream = self._ended(event.assignment)
        return (r.Moved(event.at, stream.sample, event.assignment, stream.engine, stream.pieces, event.cause),)

    def _turn_ended(self, event: f.TurnEnded) -> Iterable[r.AnyRecord]:
        number = self._assignments.get(event.sample, 0)
        stream = self._ended(number)
        return (r.TurnEnded(event.at, event.sample, number, stream.engine, stream.pieces, event.finish),)

    def _ended(self, number: int) -> _Stream:
        stream = self._streams.pop(number, None) or _Stream("", "")
        self._assignments.pop(stream.sample, None)
        return stream

    # --- groups and batches -------------------------------------------------------------------------------------------

    def _submitted(self, event: f.GroupSubmitted) -> Iterable[r.AnyRecord]:
        group = event.group
        self._sizes[group.id] = group.n
        prompt = len(group.prompt_ids) // BYTES_PER_TOKEN
        budget, versions = group.sampling.max_new_tokens, (group.min_version, group.max_version)
        return (r.Submitted(event.at, group.id, group.n, group.step, group.purpose, prompt, budget, *versions),)

    def _discarded(self, event: f.GroupDiscarded) -> Iterable[r.AnyRecord]:
        told: list[r.AnyRecord] = []
        for index in range(self._sizes.pop(event.group, 0)):
            name = sample_id(event.group, index)
            number = self._assignments.get(name)
            if number is not None:
                stream = self._ended(number)
                told.append(r.Cut(event.at, name, number, stream.engine, stream.pieces))
        told.append(r.Discarded(event.at, event.group, event.culprit, event.reason, event.detail))
        return told

    def _packed(self, event: f.BatchPacked) -> Iterable[r.AnyRecord]:
        request = event.request
        since, due = self._asked.pop(request.request, (event.at, inf))
        for number in event.groups:
            self._sizes.pop(number, None)
        asked = (request.request, request.step, request.purpose, request.min_samples, request.max_samples)
        told: list[r.AnyRecord] = [r.Batched(event.at, event.batch, *asked, event.groups, event.last, since, due)]
        told.extend(r.Packed(event.at, number, event.batch) for number in event.groups)
        return told


def _newest(state: LedgerState) -> float:
    """The newest moment that a state tells of; 0 for one in which nothing has happened."""
    moments = [pending.since for pending in state.pending.values()]
    moments += [sample.since for sample in state.samples.values()]
    return max((moment for moment in moments if isfinite(moment)), default=0.0)


def _under_way(state: LedgerState, number: int) -> _Stream:
    assignment = state.assignments[number]
    sample = state.samples[assignment.sample]
    ours = [s for s in sample.spans if s.attempt == sample.attempt and s.version != ENVIRONMENT_VERSION]
    stream = _Stream(assignment.sample, assignment.engine)
    for span in ours:
        stream.begin_piece(span.start, span.end - span.start, span.version)
    return stream


_TELLERS: Final[dict[type, Callable[[Historian, Any], Iterable[r.AnyRecord]]]] = {
    f.LeasesRenewed: Historian._renewed,
    f.BatchRequested: Historian._asked_for,
    f.BatchRequestClosed: Historian._closed,
    f.TrainerHeard: Historian._trainer_heard,
    f.EngineGreeted: Historian._greeted,
    f.EngineHeard: Historian._heard_of,
    f.EngineServing: Historian._serving,
    f.EngineGone: Historian._gone,
    f.TokensTaken: Historian._tokens,
    f.Assigned: Historian._assigned,
    f.Moved: Historian._moved,
    f.TurnEnded: Historian._turn_ended,
    f.GroupSubmitted: Historian._submitted,
    f.GroupDiscarded: Historian._discarded,
    f.BatchPacked: Historian._packed,
    f.GroupCompleted: lambda _, event: (r.Completed(event.at, event.group),),
    f.BatchAcknowledged: lambda _, event: (r.Acknowledged(event.at, event.batch),),
    f.BatchReturned: lambda _, event: (r.Unpacked(event.at, event.batch),),
    f.NumbersTaken: lambda _, event: (r.NumbersTaken(event.at, event.group, event.batch, event.assignment),),
    f.TrainerGreeted: lambda _, event: (r.TrainerCame(event.at, event.trainer),),
    f.TurnExtended: lambda _, event: (r.Extended(event.at, event.sample, len(event.ids) // BYTES_PER_TOKEN),),
    f.SampleScored: lambda _, event: (r.Scored(event.at, event.sample, event.reward, event.metrics),),
    f.VersionPublished: lambda _, event: (r.Published(event.at, event.version),),
    f.WindowSet: lambda _, event: (r.Window(event.at, event.open, event.token_s, event.read_s),),
    f.EngineQuarantined: lambda _, event: (r.Struck(event.at, event.engine, event.cause, event.quarantined_until),),
    f.EngineRestored: lambda _, event: (r.Trusted(event.at, event.engine, event.cause),),
    f.EngineDraining: lambda _, event: (r.Draining(event.at, event.engine, event.reason, event.drain_at),),
    f.RunFinished: lambda _, event: (r.Finished(event.at, event.ok, event.message),),
}
