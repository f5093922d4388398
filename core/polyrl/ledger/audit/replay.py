"""The ledger's replayed state against an audit's books (I10), and bytes against tokens (I11). Part of `audit`.

Refuses to hold: a fold. Read next: `journal_format`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from polyrl.ledger.audit.batches import BatchBooks
from polyrl.ledger.audit.engines import EngineBooks
from polyrl.ledger.audit.findings import Findings
from polyrl.ledger.audit.samples import GroupBook, Place, SampleBook, SampleBooks
from polyrl.ledger.state import ENVIRONMENT_VERSION, Counters, LedgerState, SamplePhase, SampleState
from polyrl.sample import sample_id
from polyrl.wire import ROW_DTYPE

TOKEN_BYTES: Final = 8
"""Id and logprob."""

MAX_TOKEN_BYTES: Final = TOKEN_BYTES + ROW_DTYPE.itemsize
"""A row of one token."""


def compare(
    findings: Findings, state: LedgerState, engines: EngineBooks, samples: SampleBooks, batches: BatchBooks, at: float
) -> None:
    """Breaks I10 for everything in which the state and the books differ. What running assignments have brought so far
    is known to the state alone: it is checked as if they ended now."""
    for number in sorted(state.groups.keys() & samples.live.keys()):
        findings.saw("I10", "live groups")
        book, entry = samples.live[number], state.groups[number]
        if (entry.ready, entry.batch) != (book.complete, book.batch):
            text = f"group {number} is complete={entry.ready}, batch={entry.batch}; records tell {book.complete}, "
            findings.broke("I10", at, f"{text}{book.batch}")
        for index, sample in enumerate(book.samples):
            name = sample_id(number, index)
            _finish_running(samples, state, name)
            for text in _sample_differences(state.samples[name], book, sample):
                findings.broke("I10", at, f"sample {name} {text}")
    for what, told, folded in _totals(state, engines, samples, batches):
        findings.saw("I10", "totals")
        if told != folded:
            findings.broke("I10", at, f"{what}: the events give {_short(folded)}, the records {_short(told)}")


def _finish_running(samples: SampleBooks, state: LedgerState, name: str) -> None:
    sample = state.samples[name]
    if not sample.assignment:
        return
    assignment = state.assignments[sample.assignment]
    ours = [s for s in sample.spans if s.attempt == sample.attempt and s.version != ENVIRONMENT_VERSION]
    pieces = [(s.start, s.end, s.version) for s in ours]
    samples.check_pieces(name, assignment.engine, pieces, assignment.progress_at)


def _sample_differences(folded: SampleState, group: GroupBook, told: SampleBook) -> Iterator[str]:
    phase = Place.SCORED if folded.phase is SamplePhase.PACKED else folded.phase
    if phase.value != told.place.value:
        yield f"is {folded.phase}; records tell {told.place}"
    if folded.assignment != told.assignment:
        yield f"is in assignment {folded.assignment}; records tell {told.assignment}"
    if (folded.length, folded.generated) != (told.length, told.generated):
        yield f"has {folded.length} tokens, {folded.generated} generated; records tell {told.length}, {told.generated}"


def _totals(
    state: LedgerState, engines: EngineBooks, samples: SampleBooks, batches: BatchBooks
) -> Iterator[tuple[str, object, object]]:
    counters = state.counters
    yield "live groups", sorted(samples.live), sorted(state.groups)
    yield "samples submitted", samples.submitted, counters.submitted
    yield "samples acknowledged", samples.acknowledged, counters.acknowledged
    yield "samples discarded", samples.discarded, sum(counters.discarded.values())
    yield "tokens accepted", samples.tokens, counters.tokens_accepted
    yield "newest assignment", samples.last_assignment, state.next_assignment - 1
    yield "newest batch", batches.last_batch, state.next_batch - 1
    yield "unacknowledged batches", batches.unacknowledged, {n: b.groups for n, b in state.batches.items()}
    told = {name: (engine.version, engine.draining) for name, engine in engines.live.items()}
    yield "engines", told, {name: (engine.version, bool(engine.draining)) for name, engine in state.engines.items()}


def traffic(findings: Findings, counters: Counters, at: float) -> None:
    """Breaks I11 when agents sent more bytes than their tokens need at most, or less than they need at least.

    A row may bring no token, only an end: one more per row that was taken and one per frame are allowed for.
    """
    received = counters.tokens_accepted + counters.tokens_in_vain + counters.tokens_repeated
    if not counters.delta_frames:
        return
    findings.saw("I11", "tokens received", received)
    findings.saw("I11", "bytes", counters.delta_bytes)
    bare = (counters.delta_rows + counters.delta_frames) * ROW_DTYPE.itemsize
    if counters.delta_bytes > received * MAX_TOKEN_BYTES + bare:
        findings.broke("I11", at, f"{received} tokens came in {counters.delta_bytes} bytes, which is too many")
    if counters.delta_bytes < received * TOKEN_BYTES:
        findings.broke("I11", at, f"{received} tokens came in {counters.delta_bytes} bytes, which is too few")


def _short(value: object) -> str:
    text = str(value)
    limit = 160
    return text if len(text) <= limit else f"{text[:limit]}..."
