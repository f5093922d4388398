"""The audit of a run: a fold of its own over the records, which checks the invariants as far as a journal shows them.

    audit = Audit(); for record in records: audit.take(record); verdicts = audit.conclude(state, at)

It shares no line with the ledger's fold, and keeps books of its own: it can find that fold's faults, and a journal's.
`state` is what the ledger makes of the events; that it and the records tell the same is I10. What only a peer can
see (the text of a token, what an engine really loaded) is not in a journal.

Refuses to hold: files, text for terminals. Read next: `audit_samples`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from polyrl.ledger.audit import records as r
from polyrl.ledger.audit.batches import BatchBooks
from polyrl.ledger.audit.engines import EngineBooks
from polyrl.ledger.audit.findings import Findings, Verdict
from polyrl.ledger.audit.replay import compare, traffic
from polyrl.ledger.audit.samples import SampleBooks
from polyrl.ledger.audit.window import WindowBooks
from polyrl.ledger.state import LedgerState


class Audit:
    """The books of one run."""

    def __init__(self) -> None:
        self.findings = Findings()
        self.engines = EngineBooks(self.findings)
        self.samples = SampleBooks(self.findings, self.engines)
        self.batches = BatchBooks(self.findings, self.engines, self.samples)
        self.window = WindowBooks(self.findings, self.engines, self.samples)
        self._finished = False
        self._at = 0.0

    def take(self, record: r.AnyRecord) -> None:
        """The next record, in the order in which they were written."""
        self._at = max(self._at, record.at)
        handler = _HANDLERS.get(type(record))
        if handler is not None:
            handler(self, record)

    def conclude(self, state: LedgerState | None) -> list[Verdict]:
        """To be called once, after the last record; `state`: the journal's events replayed, None if there are none."""
        self.findings.saw("I1", "ends", len(self.samples.ends))
        if self._finished and self.samples.live:
            first = min(self.samples.live)
            text = f"the run has ended and {len(self.samples.live)} groups have not, group {first} first"
            self.findings.broke("I1", self._at, text)
        self.batches.conclude()
        self.window.conclude(self._at)
        if state is not None:
            compare(self.findings, state, self.engines, self.samples, self.batches, self._at)
            traffic(self.findings, state.counters, self._at)
        return self.findings.verdicts()

    def _began(self, record: r.Began) -> None:
        self.engines.config = record.config
        self.window.renewed(record.at)

    def _renewed(self, record: r.Renewed) -> None:
        self.batches.renewed(record)
        self.window.renewed(record.at)

    def _finished_run(self, record: r.Finished) -> None:
        self._finished = True

    def _numbers_taken(self, record: r.NumbersTaken) -> None:
        self.samples.last_assignment = max(self.samples.last_assignment, record.assignment - 1)
        self.batches.last_batch = max(self.batches.last_batch, record.batch - 1)

    def _submitted(self, record: r.Submitted) -> None:
        self.samples.submit(record)
        self.batches.submitted(record)
        self.window.submitted(record)

    def _discarded(self, record: r.Discarded) -> None:
        self.batches.discarded(record)
        self.samples.discard(record)

    def _assigned(self, record: r.Assigned) -> None:
        self.engines.assigned(record)
        self.samples.assign(record)
        self.window.assigned(record)

    def _moved(self, record: r.Moved | r.Cut) -> None:
        self.window.ended(record)
        self.samples.move(record)
        self.engines.ended(record)

    def _turn_ended(self, record: r.TurnEnded) -> None:
        self.window.ended(record)
        self.samples.end_turn(record)
        self.engines.ended(record)

    def _greeted(self, record: r.Greeted) -> None:
        self.engines.greeted(record)
        self.window.engines_changed(record)

    def _serving(self, record: r.Serving) -> None:
        self.engines.serving(record)
        self.window.engines_changed(record)

    def _struck(self, record: r.Struck) -> None:
        self.engines.struck(record)
        self.window.engines_changed(record)

    def _trusted(self, record: r.Trusted) -> None:
        self.engines.trusted(record)
        self.window.engines_changed(record)

    def _draining(self, record: r.Draining) -> None:
        self.engines.draining(record)
        self.window.engines_changed(record)

    def _gone(self, record: r.Gone) -> None:
        self.engines.gone(record)
        self.window.gone(record)


_HANDLERS: Final[dict[type, Callable[[Audit, Any], None]]] = {
    r.Began: Audit._began,
    r.Finished: Audit._finished_run,
    r.NumbersTaken: Audit._numbers_taken,
    r.Submitted: Audit._submitted,
    r.Discarded: Audit._discarded,
    r.Assigned: Audit._assigned,
    r.Moved: Audit._moved,
    r.Cut: Audit._moved,
    r.TurnEnded: Audit._turn_ended,
    r.Renewed: Audit._renewed,
    r.Window: lambda audit, record: audit.window.window(record),
    r.Unanswered: lambda audit, record: audit.batches.unanswered(record),
    r.Stray: lambda audit, record: audit.samples.stray(record),
    r.Extended: lambda audit, record: audit.samples.extend(record),
    r.Scored: lambda audit, record: audit.samples.score(record),
    r.Completed: lambda audit, record: audit.batches.completed(record),
    r.Batched: lambda audit, record: audit.batches.batched(record),
    r.Acknowledged: lambda audit, record: audit.batches.acknowledged(record),
    r.Unpacked: lambda audit, record: audit.batches.unpacked(record),
    r.Greeted: Audit._greeted,
    r.Serving: Audit._serving,
    r.Struck: Audit._struck,
    r.Trusted: Audit._trusted,
    r.Draining: Audit._draining,
    r.Gone: Audit._gone,
}
