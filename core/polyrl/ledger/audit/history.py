"""The historian: facts in, records out (see `records`). What it tells outlives the tokens.

A journal forgets facts once a snapshot holds what still matters of them; records stay, a few hundred bytes per sample.
They are told from facts alone. The ledger's state is read once, when an incarnation begins, for what is under way then:
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
from polyrl.ledger.state import ENVIRONMENT_VERSION, State
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
    """Turns facts into records. Holds what is under way: running assignments, group sizes, who was heard when."""

    def __init__(self, state: State) -> None:
        """`state`: the ledger's, as it is before the first fact that will be told."""
        self._sizes = {number: entry.group.n for number, entry in state.groups.items()}
        self._streams = {number: _under_way(state, number) for number in state.assignments}
        self._assignments = {stream.sample: number for number, stream in self._streams.items()}
        self._versions = {name: engine.version for name, engine in state.engines.items()}
        self._heard = {name: engine.heard_at for name, engine in state.engines.items()}
        self._asked = {number: (entry.since, entry.due) for number, entry in state.pending.items()}
        self._at = _newest(state)
        """The newest moment that a fact told; facts without one happened then or a little later."""

    def tell(self, fact: f.Fact) -> Iterable[r.AnyRecord]:
        """The records of the next fact, durable or not; mostly none."""
        teller = _TELLERS.get(type(fact))
        return () if teller is None else teller(self, fact)

    # --- the run ------------------------------------------------------------------------------------------------------

    def _renewed(self, fact: f.LeasesRenewed) -> Iterable[r.AnyRecord]:
        self._heard = {name: max(at, fact.at) for name, at in self._heard.items()}
        return (r.Renewed(fact.at),)

    def _asked_for(self, fact: f.NextAsked) -> Iterable[r.AnyRecord]:
        self._at = fact.at
        self._asked[fact.request.request] = (fact.at, fact.at + fact.request.deadline_s)
        return ()

    def _closed(self, fact: f.NextClosed) -> Iterable[r.AnyRecord]:
        since, due = self._asked.pop(fact.request, (self._at, inf))
        return (r.Unanswered(self._at, fact.request, since, due),)

    def _trainer_heard(self, fact: f.TrainerHeard) -> Iterable[r.AnyRecord]:
        self._at = fact.at
        return ()

    # --- engines ------------------------------------------------------------------------------------------------------

    def _greeted(self, fact: f.EngineGreeted) -> Iterable[r.AnyRecord]:
        self._heard[fact.engine] = fact.at
        self._versions[fact.engine] = fact.version
        return (r.Greeted(fact.at, fact.engine, fact.pool, fact.max_running, fact.version),)

    def _heard_of(self, fact: f.EngineHeard) -> Iterable[r.AnyRecord]:
        self._heard[fact.engine] = self._at = fact.at
        return ()

    def _serving(self, fact: f.EngineServing) -> Iterable[r.AnyRecord]:
        self._versions[fact.engine] = fact.version
        return (r.Serving(fact.at, fact.engine, fact.version),)

    def _gone(self, fact: f.EngineGone) -> Iterable[r.AnyRecord]:
        self._versions.pop(fact.engine, None)
        return (r.Gone(fact.at, fact.engine, fact.cause, self._heard.pop(fact.engine, -inf)),)

    # --- tokens -------------------------------------------------------------------------------------------------------

    def _tokens(self, fact: f.TokensTaken) -> Iterable[r.AnyRecord]:
        self._heard[fact.engine] = self._at = fact.at
        numbers, offsets, counts, _ = row_columns(fact.rows)
        streams, version, strays = self._streams, fact.version, []
        for number, offset, count in zip(numbers, offsets, counts, strict=True):
            if not count:
                continue
            stream = streams.get(number)
            if stream is None:
                strays.append(r.Stray(fact.at, number, count))
            elif stream.end == offset and stream.version == version:
                stream.end += count
            else:
                stream.begin_piece(offset, count, version)
        return strays

    def _assigned(self, fact: f.Assigned) -> Iterable[r.AnyRecord]:
        self._streams[fact.assignment] = _Stream(fact.sample, fact.engine)
        self._assignments[fact.sample] = fact.assignment
        version = self._versions.get(fact.engine, ENVIRONMENT_VERSION)
        return (r.Assigned(fact.at, fact.sample, fact.assignment, fact.engine, version),)

    def _moved(self, fact: f.Moved) -> Iterable[r.AnyRecord]:
        stream = self._ended(fact.assignment)
        return (r.Moved(fact.at, stream.sample, fact.assignment, stream.engine, stream.pieces, fact.cause),)

    def _turn_ended(self, fact: f.TurnEnded) -> Iterable[r.AnyRecord]:
        number = self._assignments.get(fact.sample, 0)
        stream = self._ended(number)
        return (r.TurnEnded(fact.at, fact.sample, number, stream.engine, stream.pieces, fact.finish),)

    def _ended(self, number: int) -> _Stream:
        stream = self._streams.pop(number, None) or _Stream("", "")
        self._assignments.pop(stream.sample, None)
        return stream

    # --- groups and batches -------------------------------------------------------------------------------------------

    def _submitted(self, fact: f.GroupSubmitted) -> Iterable[r.AnyRecord]:
        group = fact.group
        self._sizes[group.id] = group.n
        prompt = len(group.prompt_ids) // BYTES_PER_TOKEN
        budget, versions = group.sampling.max_new_tokens, (group.min_version, group.max_version)
        return (r.Submitted(fact.at, group.id, group.n, group.step, group.purpose, prompt, budget, *versions),)

    def _discarded(self, fact: f.GroupDiscarded) -> Iterable[r.AnyRecord]:
        told: list[r.AnyRecord] = []
        for index in range(self._sizes.pop(fact.group, 0)):
            name = sample_id(fact.group, index)
            number = self._assignments.get(name)
            if number is not None:
                stream = self._ended(number)
                told.append(r.Cut(fact.at, name, number, stream.engine, stream.pieces))
        told.append(r.Discarded(fact.at, fact.group, fact.culprit, fact.reason, fact.detail))
        return told

    def _packed(self, fact: f.BatchPacked) -> Iterable[r.AnyRecord]:
        request = fact.request
        since, due = self._asked.pop(request.request, (fact.at, inf))
        for number in fact.groups:
            self._sizes.pop(number, None)
        asked = (request.request, request.step, request.purpose, request.min_samples, request.max_samples)
        told: list[r.AnyRecord] = [r.Batched(fact.at, fact.batch, *asked, fact.groups, fact.last, since, due)]
        told.extend(r.Packed(fact.at, number, fact.batch) for number in fact.groups)
        return told


def _newest(state: State) -> float:
    """The newest moment that a state tells of; 0 for one in which nothing has happened."""
    moments = [pending.since for pending in state.pending.values()]
    moments += [sample.since for sample in state.samples.values()]
    return max((moment for moment in moments if isfinite(moment)), default=0.0)


def _under_way(state: State, number: int) -> _Stream:
    assignment = state.assignments[number]
    sample = state.samples[assignment.sample]
    ours = [s for s in sample.spans if s.attempt == sample.attempt and s.version != ENVIRONMENT_VERSION]
    stream = _Stream(assignment.sample, assignment.engine)
    for span in ours:
        stream.begin_piece(span.start, span.end - span.start, span.version)
    return stream


_TELLERS: Final[dict[type, Callable[[Historian, Any], Iterable[r.AnyRecord]]]] = {
    f.LeasesRenewed: Historian._renewed,
    f.NextAsked: Historian._asked_for,
    f.NextClosed: Historian._closed,
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
    f.GroupCompleted: lambda _, fact: (r.Completed(fact.at, fact.group),),
    f.BatchAcknowledged: lambda _, fact: (r.Acknowledged(fact.at, fact.batch),),
    f.BatchReturned: lambda _, fact: (r.Unpacked(fact.at, fact.batch),),
    f.NumbersTaken: lambda _, fact: (r.NumbersTaken(fact.at, fact.group, fact.batch, fact.assignment),),
    f.TrainerGreeted: lambda _, fact: (r.TrainerCame(fact.at, fact.trainer),),
    f.TurnExtended: lambda _, fact: (r.Extended(fact.at, fact.sample, len(fact.ids) // BYTES_PER_TOKEN),),
    f.SampleScored: lambda _, fact: (r.Scored(fact.at, fact.sample, fact.reward, fact.metrics),),
    f.VersionPublished: lambda _, fact: (r.Published(fact.at, fact.version),),
    f.WindowSet: lambda _, fact: (r.Window(fact.at, fact.open, fact.token_s, fact.read_s),),
    f.EngineStruck: lambda _, fact: (r.Struck(fact.at, fact.engine, fact.cause, fact.trusted_at),),
    f.EngineTrusted: lambda _, fact: (r.Trusted(fact.at, fact.engine, fact.cause),),
    f.EngineDraining: lambda _, fact: (r.Draining(fact.at, fact.engine, fact.reason, fact.drain_at),),
    f.RunFinished: lambda _, fact: (r.Finished(fact.at, fact.ok, fact.message),),
}
