"""The audit of a run: goes through its history and checks the invariants as far as events show them.

    audit = Audit(); for entry in entries: audit.take(entry); verdicts = audit.conclude(state)

It shares no line with how the ledger applies events, so it can find that code's faults, and a journal's. `state` is
what the ledger makes of the events; that it and the history agree is I10. What only a peer can see (the text of a
token, what an engine really loaded) is in no event; the simulation knows it and checks it besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from polyrl.ledger import events as f
from polyrl.ledger.audit import history
from polyrl.ledger.audit.batches import BatchAudit
from polyrl.ledger.audit.engines import EngineAudit
from polyrl.ledger.audit.findings import Findings, Verdict
from polyrl.ledger.audit.samples import SampleAudit
from polyrl.ledger.audit.state_check import check_traffic, compare
from polyrl.ledger.audit.window import WindowAudit
from polyrl.ledger.state import LedgerState


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
        self.window.conclude(self._at)
        if state is not None:
            compare(self.findings, state, self.engines, self.samples, self.batches, self._at)
            check_traffic(self.findings, state.counters, self._at)
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
            self._end_assignment(number, "", entry.at)
        self.batches.discarded(event)
        group = self.samples.end(event.group, "discarded", entry.at)
        if group is not None:
            self.samples.totals.discarded += group.group.n

    def _assigned(self, event: f.Assigned, entry: history.HistoryEntry) -> None:
        self.engines.assigned(event, entry.at)
        self.samples.assigned(event, entry.at)
        self.window.assigned(event, entry.at)

    def _moved(self, event: f.Moved, entry: history.HistoryEntry) -> None:
        self._end_assignment(event.assignment, event.cause, entry.at)

    def _turn_ended(self, event: f.TurnEnded, entry: history.HistoryEntry) -> None:
        number = self.samples.assignment_of(event.sample)
        if number:
            self._end_assignment(number, "", entry.at)
        self.samples.turn_ended(event, entry.at)

    def _end_assignment(self, number: int, cause: str, at: float) -> None:
        self.window.ended(number, cause, at)
        assigned = self.samples.end_assignment(number, at)
        if assigned is not None:
            self.engines.assignment_ended(assigned.engine, number)

    def _gone(self, event: f.EngineGone, entry: history.HistoryEntry) -> None:
        self.engines.gone(event, entry.at)
        self.window.gone(event.engine, entry.at)


_Handler = Callable[[Audit, Any, history.HistoryEntry], None]


def _of_engine(check: Callable[[EngineAudit, Any, float], None]) -> _Handler:
    """The handler of an event after which other engines may have become able to take what reserved ones run."""

    def handle(audit: Audit, event: f.Event, entry: history.HistoryEntry) -> None:
        check(audit.engines, event, entry.at)
        audit.window.engines_changed(entry.at)

    return handle


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
    f.TurnEnded: Audit._turn_ended,
    f.TurnExtended: lambda audit, event, entry: audit.samples.extended(event, entry.tokens, entry.at),
    f.SampleScored: lambda audit, event, entry: audit.samples.scored(event, entry.at),
    f.GroupCompleted: lambda audit, event, entry: audit.batches.completed(event, entry.at),
    f.BatchRequested: lambda audit, event, entry: audit.batches.requested(event, entry.at),
    f.BatchRequestClosed: lambda audit, event, entry: audit.batches.closed(event, entry.at),
    f.BatchPacked: lambda audit, event, entry: audit.batches.packed(event, entry.at),
    f.BatchAcknowledged: lambda audit, event, entry: audit.batches.acknowledged(event, entry.at),
    f.BatchReturned: lambda audit, event, entry: audit.batches.returned(event, entry.at),
    f.WindowSet: lambda audit, event, entry: audit.window.window(event, entry.at),
    f.EngineHeard: lambda audit, event, entry: audit.engines.heard(event, entry.at),
    f.EngineGreeted: _of_engine(EngineAudit.greeted),
    f.EngineServing: _of_engine(EngineAudit.serving),
    f.EngineQuarantined: _of_engine(EngineAudit.quarantined),
    f.EngineRestored: _of_engine(EngineAudit.restored),
    f.EngineDraining: _of_engine(EngineAudit.draining),
    f.EngineGone: Audit._gone,
}
