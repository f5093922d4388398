"""The audit of a run: goes through its history and checks the invariants as far as events show them.

    audit = Audit(); for entry in entries: audit.take(entry); verdicts = audit.conclude(state)

It shares no line with how the ledger applies events, so it can find that code's faults, and a journal's. `state` is
what the ledger makes of the events; that it and the history agree is I10. What only a peer can see (the text of a
token, what an engine really loaded) is in no event; the simulation knows it and checks it besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from polyrl.ledger import events as f
from polyrl.ledger.audit import history
from polyrl.ledger.audit.batches import BatchAudit
from polyrl.ledger.audit.engines import EngineAudit
from polyrl.ledger.audit.findings import Findings, Verdict
from polyrl.ledger.audit.samples import AuditedSample, SampleAudit
from polyrl.ledger.audit.window import WindowAudit
from polyrl.ledger.causes import MoveCause
from polyrl.ledger.state import Counters, LedgerState, SamplePhase, SampleState
from polyrl.sample import sample_id
from polyrl.wire import ROW_DTYPE, TOKEN_BYTES

MAX_TOKEN_BYTES: Final = TOKEN_BYTES + ROW_DTYPE.itemsize
"""A row of one token."""

MAX_TEXT: Final = 160
"""Characters of a value in a finding."""


class Audit:
    """One run."""

    def __init__(self) -> None:
        self.findings = Findings()
        self.engines = EngineAudit(self.findings)
        self.samples = SampleAudit(self.findings, self.engines)
        self.batches = BatchAudit(self.findings, self.engines, self.samples)
        self.window = WindowAudit(self.findings, self.engines, self.samples)
        self._finished = False
        self._at = 0.0

    def take(self, entry: history.HistoryEntry) -> None:
        """The next entry, in the order in which they were written."""
        self._at = max(self._at, entry.at)
        handler = _HANDLERS.get(type(entry.event))
        if handler is not None:
            handler(self, entry.event, entry)

    def conclude(self, state: LedgerState | None) -> list[Verdict]:
        """To be called once, after the last entry; `state`: the journal's events replayed, None if there are none."""
        self.findings.saw("I1", "ends", len(self.samples.ends))
        if self._finished and self.samples.live:
            first = min(self.samples.live)
            text = f"the run has ended and {len(self.samples.live)} groups have not, group {first} first"
            self.findings.broke("I1", self._at, text)
        self.batches.conclude()
        if state is not None:
            _compare(self.findings, state, self.engines, self.samples, self.batches, self._at)
            _check_traffic(self.findings, state.counters, state.next_assignment, self._at)
        return self.findings.verdicts()

    def _started(self, event: history.ManagerStarted, entry: history.HistoryEntry) -> None:
        self.engines.config = event.config
        self.window.renewed(entry.at)

    def _renewed(self, event: f.LeasesRenewed, entry: history.HistoryEntry) -> None:
        self.batches.renewed(entry.at)
        self.window.renewed(entry.at)

    def _run_finished(self, event: f.RunFinished, entry: history.HistoryEntry) -> None:
        self._finished = True

    def _numbers_taken(self, event: f.NumbersTaken, entry: history.HistoryEntry) -> None:
        self.samples.last_assignment = max(self.samples.last_assignment, event.assignment - 1)
        self.batches.last_batch = max(self.batches.last_batch, event.batch - 1)

    def _submitted(self, event: f.GroupSubmitted, entry: history.HistoryEntry) -> None:
        self.samples.submitted(event, entry.tokens, entry.at)
        self.batches.submitted(event)
        self.window.submitted(event)

    def _discarded(self, event: f.GroupDiscarded, entry: history.HistoryEntry) -> None:
        for number in self.samples.running_of(event.group):
            self._end_assignment(number, None, entry.at)
        self.batches.discarded(event)
        group = self.samples.end(event.group, "discarded", entry.at)
        if group is not None:
            self.samples.totals.discarded += group.submitted.n

    def _assigned(self, event: f.Assigned, entry: history.HistoryEntry) -> None:
        self.engines.assigned(event, entry.at)
        self.samples.assigned(event, entry.at)
        self.window.assigned(event, entry.at)

    def _reclaimed(self, event: f.Reclaimed, entry: history.HistoryEntry) -> None:
        number = self.samples.assignment_of(event.sample)
        if number:
            self._end_assignment(number, None, entry.at)
        again = f.Assigned(event.assignment, event.sample, engine=event.engine, kv=event.kv, at=event.at)
        self.engines.assigned(again, entry.at, reclaimed=True)
        self.samples.reclaimed(again, event.length, entry.at)
        self.window.assigned(again, entry.at)

    def _moved(self, event: f.Moved, entry: history.HistoryEntry) -> None:
        self._end_assignment(event.assignment, event.cause, entry.at)

    def _turn_ended(self, event: f.TurnEnded, entry: history.HistoryEntry) -> None:
        number = self.samples.assignment_of(event.sample)
        if number:
            self._end_assignment(number, None, entry.at)
        self.samples.turn_ended(event, entry.at)

    def _end_assignment(self, number: int, cause: MoveCause | None, at: float) -> None:
        self.window.ended(number, cause, at)
        assigned = self.samples.end_assignment(number, at)
        if assigned is not None:
            self.engines.assignment_ended(assigned.engine, number)

    def _packed(self, event: f.BatchPacked, entry: history.HistoryEntry) -> None:
        self.batches.packed(event, entry.at)
        self.window.packed(event, entry.at)

    def _gone(self, event: f.EngineGone, entry: history.HistoryEntry) -> None:
        self.engines.gone(event, entry.at)
        self.window.gone(event.engine)


_Handler = Callable[[Audit, Any, history.HistoryEntry], None]


def _of_engine(check: Callable[[EngineAudit, Any, float], None]) -> _Handler:
    return lambda audit, event, entry: check(audit.engines, event, entry.at)


_HANDLERS: Final[dict[type, _Handler]] = {
    history.ManagerStarted: Audit._started,
    history.AssignmentTokens: lambda audit, event, entry: audit.samples.tokens(event, entry.at),
    f.LeasesRenewed: Audit._renewed,
    f.RunFinished: Audit._run_finished,
    f.NumbersTaken: Audit._numbers_taken,
    f.GroupSubmitted: Audit._submitted,
    f.GroupDiscarded: Audit._discarded,
    f.Assigned: Audit._assigned,
    f.Moved: Audit._moved,
    f.Reclaimed: Audit._reclaimed,
    f.TurnEnded: Audit._turn_ended,
    f.TurnExtended: lambda audit, event, entry: audit.samples.extended(event, entry.tokens, entry.at),
    f.SampleScored: lambda audit, event, entry: audit.samples.scored(event, entry.at),
    f.GroupCompleted: lambda audit, event, entry: audit.batches.completed(event, entry.at),
    f.BatchRequested: lambda audit, event, entry: audit.batches.requested(event, entry.at),
    f.BatchRequestClosed: lambda audit, event, entry: audit.batches.closed(event, entry.at),
    f.BatchPacked: Audit._packed,
    f.BatchAcknowledged: lambda audit, event, entry: audit.batches.acknowledged(event, entry.at),
    f.BatchReleased: lambda audit, event, entry: audit.batches.released(event, entry.at),
    f.BatchReturned: lambda audit, event, entry: audit.batches.returned(event, entry.at),
    f.WindowSet: lambda audit, event, entry: audit.window.window_set(event, entry.at),
    f.EngineHeard: lambda audit, event, entry: audit.engines.heard(event, entry.at),
    f.EngineGreeted: _of_engine(EngineAudit.greeted),
    f.EngineSilent: _of_engine(EngineAudit.fell_silent),
    f.EngineReturned: _of_engine(EngineAudit.returned),
    f.EngineServing: _of_engine(EngineAudit.serving),
    f.EngineRests: _of_engine(EngineAudit.rests),
    f.EngineQuarantined: _of_engine(EngineAudit.quarantined),
    f.EngineDraining: _of_engine(EngineAudit.draining),
    f.EngineGone: Audit._gone,
}


def _compare(
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
        if entry.group.n != audited.submitted.n:
            text = f"group {number} has {entry.group.n} samples; the history shows {audited.submitted.n}"
            findings.broke("I10", at, text)
            continue
        for index in range(entry.group.n):
            name = sample_id(number, index)
            if name not in state.samples:
                findings.broke("I10", at, f"sample {name} is missing; the history shows it")
                break
            _count_running(samples, state, name)
            for text in _sample_differences(state.samples[name], audited.sample(index)):
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
        samples.check_pieces(name, assignment.engine, history.pieces_of(sample), assignment.progress_at)


def _sample_differences(replayed: SampleState, shown: AuditedSample) -> Iterator[str]:
    phase = SamplePhase.SCORED if replayed.phase in (SamplePhase.PACKED, SamplePhase.KEPT) else replayed.phase
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


def _check_traffic(findings: Findings, counters: Counters, assignments: int, at: float) -> None:
    """Breaks I11 when agents sent more bytes than their tokens need at most, or less than they need at least.

    A row may bring no token, only an end: one for each assignment there ever was, and one per frame, whose rows may
    come again, are allowed for. Rows that bring nothing are what a wasteful stream is made of, so their own number
    excuses none.
    """
    received = counters.tokens_accepted + counters.tokens_in_vain + counters.tokens_repeated
    if not counters.delta_frames:
        return
    findings.saw("I11", "tokens received", received)
    findings.saw("I11", "bytes", counters.delta_bytes)
    bare = (assignments + counters.delta_frames) * ROW_DTYPE.itemsize
    if counters.delta_bytes > received * MAX_TOKEN_BYTES + bare:
        findings.broke("I11", at, f"{received} tokens came in {counters.delta_bytes} bytes, which is too many")
    if counters.delta_bytes < received * TOKEN_BYTES:
        findings.broke("I11", at, f"{received} tokens came in {counters.delta_bytes} bytes, which is too few")
