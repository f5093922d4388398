"""The ledger's replayed state against an audit (I10), and bytes against tokens (I11)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from polyrl.ledger.audit.batches import BatchAudit
from polyrl.ledger.audit.engines import EngineAudit
from polyrl.ledger.audit.findings import Findings
from polyrl.ledger.audit.history import pieces_of
from polyrl.ledger.audit.samples import AuditedSample, SampleAudit
from polyrl.ledger.state import Counters, LedgerState, SamplePhase, SampleState
from polyrl.sample import sample_id
from polyrl.wire import ROW_DTYPE

TOKEN_BYTES: Final = 8
"""Id and logprob."""

MAX_TOKEN_BYTES: Final = TOKEN_BYTES + ROW_DTYPE.itemsize
"""A row of one token."""

MAX_TEXT: Final = 160
"""Characters of a value in a finding."""


def compare(
    findings: Findings, state: LedgerState, engines: EngineAudit, samples: SampleAudit, batches: BatchAudit, at: float
) -> None:
    """Breaks I10 for everything in which the state and the audit differ. What running assignments have brought so far
    is known to the state alone: it is checked as if they ended now."""
    for number in sorted(state.groups.keys() & samples.live.keys()):
        findings.saw("I10", "live groups")
        audited, entry = samples.live[number], state.groups[number]
        if (entry.ready, entry.batch) != (audited.complete, audited.batch):
            text = f"group {number} is complete={entry.ready}, batch={entry.batch}; the history shows"
            findings.broke("I10", at, f"{text} {audited.complete}, {audited.batch}")
        for index, sample in enumerate(audited.samples):
            name = sample_id(number, index)
            _count_running(samples, state, name)
            for text in _sample_differences(state.samples[name], sample):
                findings.broke("I10", at, f"sample {name} {text}")
    for what, shown, replayed in _totals(state, engines, samples, batches):
        findings.saw("I10", "totals")
        if shown != replayed:
            text = f"{what}: the events give {str(replayed)[:MAX_TEXT]}, the history {str(shown)[:MAX_TEXT]}"
            findings.broke("I10", at, text)


def _count_running(samples: SampleAudit, state: LedgerState, name: str) -> None:
    sample = state.samples[name]
    if sample.assignment:
        assignment = state.assignments[sample.assignment]
        samples.check_pieces(name, assignment.engine, pieces_of(sample), assignment.progress_at)


def _sample_differences(replayed: SampleState, shown: AuditedSample) -> Iterator[str]:
    phase = SamplePhase.SCORED if replayed.phase is SamplePhase.PACKED else replayed.phase
    if phase is not shown.phase:
        yield f"is {replayed.phase}; the history shows {shown.phase}"
    if replayed.assignment != shown.assignment:
        yield f"is in assignment {replayed.assignment}; the history shows {shown.assignment}"
    if (replayed.length, replayed.generated) != (shown.length, shown.generated):
        text = f"has {replayed.length} tokens, {replayed.generated} generated; the history shows"
        yield f"{text} {shown.length}, {shown.generated}"


def _totals(
    state: LedgerState, engines: EngineAudit, samples: SampleAudit, batches: BatchAudit
) -> Iterator[tuple[str, object, object]]:
    counters, totals = state.counters, samples.totals
    yield "live groups", sorted(samples.live), sorted(state.groups)
    yield "samples submitted", totals.submitted, counters.submitted
    yield "samples acknowledged", totals.acknowledged, counters.acknowledged
    yield "samples discarded", totals.discarded, sum(counters.discarded.values())
    yield "tokens accepted", totals.tokens, counters.tokens_accepted
    yield "newest assignment", samples.last_assignment, state.next_assignment - 1
    yield "newest batch", batches.last_batch, state.next_batch - 1
    yield "unacknowledged batches", batches.unacknowledged, {n: b.groups for n, b in state.batches.items()}
    shown = {name: (engine.version, engine.draining) for name, engine in engines.live.items()}
    yield "engines", shown, {name: (engine.version, bool(engine.draining)) for name, engine in state.engines.items()}


def check_traffic(findings: Findings, counters: Counters, at: float) -> None:
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
