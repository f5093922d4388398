"""The reserved window in an audit's books: who generates on the trainer's devices, when, and for how long (I9).

Three things must hold. Outside the window reserved engines get nothing that others could take, and keep nothing that
others could go on with. What they hand over finds somebody: with no other engine they generate until all is done. And a
window that closes was never used for longer than the work takes that was left in it, at the speed measured by then
(one that closes before any was measured is not timed):

    busy seconds of each engine <= PACE_SLACK * (tokens left * token_s + tokens read * read_s) + progress_deadline_s

The right side lets one engine do all work, one sample after the other, so it needs no guess at who takes what.

Refuses to hold: tokens, leases (see `audit_engines`). Read next: `audit_replay`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from polyrl.ledger.audit import records as r
from polyrl.ledger.audit.engines import CLOCK_EPSILON_S, EngineBooks
from polyrl.ledger.audit.findings import Findings
from polyrl.ledger.audit.samples import Place, SampleBooks
from polyrl.sample import Pool, split_sample_id

PACE_SLACK: Final = 2.0
"""What a token may take more than was measured: the measurement is a mean over the last seconds."""

KEPT_CAUSES: Final = ("window", "rebalanced", "draining")
"""Of moves from an engine that worked as it should; all others may cost it tokens and time."""


@dataclass
class _Stay:
    """One assignment on a reserved engine."""

    engine: str
    sample: str
    overdue_since: float | None = None
    """Since when it ought to be elsewhere."""


class WindowBooks:
    """The window, and all that reserved engines run; checks I9. To be told after the other books, of ends before."""

    def __init__(self, findings: Findings, engines: EngineBooks, samples: SampleBooks) -> None:
        self._findings = findings
        self._engines = engines
        self._samples = samples
        self._open = True
        self._stays: dict[int, _Stay] = {}
        self._busy_from: dict[str, float] = {}
        """Reserved engines that run something: since when, in this window."""
        self._busy: dict[str, float] = {}
        """Seconds before that."""
        self._left = 0
        """Tokens that could still be generated when the window opened, and those submitted since."""
        self._read = 0

    def window(self, record: r.Window) -> None:
        if record.open == self._open:
            return
        self._open = record.open
        if record.open:
            self._begin(record.at)
        else:
            self._close(record)
        self.engines_changed(record)

    def submitted(self, record: r.Submitted) -> None:
        self._left += record.n * record.max_new_tokens

    def assigned(self, record: r.Assigned) -> None:
        engine = self._engines.live.get(record.engine)
        if engine is None or engine.pool is not Pool.RESERVED:
            return
        self._findings.saw("I9", "reserved assignments")
        if not self._open and self._others_can(record.sample, record.at):
            text = f"{record.engine} is given sample {record.sample} outside the window, and others could take it"
            self._findings.broke("I9", record.at, text)
        self._stays[record.assignment] = _Stay(record.engine, record.sample)
        self._busy_from.setdefault(record.engine, record.at)
        self._read += self._tokens(record.sample)[0]

    def ended(self, record: r.OfAssignment) -> None:
        stay = self._stays.pop(record.assignment, None)
        if stay is None:
            return
        self._check_stay(stay, record.at)
        if isinstance(record, r.Moved):
            self._moved(record)
        if all(other.engine != stay.engine for other in self._stays.values()):
            self._pause(stay.engine, record.at)

    def engines_changed(self, record: r.AnyRecord) -> None:
        """An engine came, went, drains, failed or serves another version; or the window moved."""
        for stay in self._stays.values():
            if self._open or not self._others_can(stay.sample, record.at):
                self._check_stay(stay, record.at)
                stay.overdue_since = None
            elif stay.overdue_since is None:
                stay.overdue_since = record.at

    def renewed(self, at: float) -> None:
        """The manager had been away: what went on meanwhile says nothing of anybody's speed."""
        self._busy.clear()
        self._busy_from = dict.fromkeys(self._busy_from, at)

    def gone(self, record: r.Gone) -> None:
        self._busy.pop(record.engine, None)
        self._busy_from.pop(record.engine, None)
        self.engines_changed(record)

    def conclude(self, at: float) -> None:
        """To be called once, after the last record."""
        for stay in self._stays.values():
            self._check_stay(stay, at)

    def _begin(self, at: float) -> None:
        self._busy.clear()
        self._busy_from = dict.fromkeys(self._busy_from, at)
        self._read = sum(self._tokens(stay.sample)[0] for stay in self._stays.values())
        groups = self._samples.live.values()
        self._left = sum(
            group.submitted.max_new_tokens - sample.generated
            for group in groups
            for sample in group.samples
            if sample.place is not Place.SCORED
        )

    def _close(self, record: r.Window) -> None:
        self._findings.saw("I9", "windows")
        running = dict(self._busy_from)
        for name in running:
            self._pause(name, record.at)
            self._busy_from[name] = record.at
        if not record.token_s:
            return
        self._findings.saw("I9", "windows at a measured speed")
        work = self._left * record.token_s + self._read * record.read_s
        bound = PACE_SLACK * work + self._engines.config.progress_deadline_s
        for name, busy in self._busy.items():
            if busy > bound:
                text = f"{name} was busy for {busy:.3f} s of a window whose {self._left} tokens take {work:.3f} s"
                self._findings.broke("I9", record.at, text)

    def _pause(self, name: str, at: float) -> None:
        began = self._busy_from.pop(name, at)
        self._busy[name] = self._busy.get(name, 0.0) + max(0.0, at - began)

    def _moved(self, record: r.Moved) -> None:
        if record.cause not in KEPT_CAUSES:
            self._busy[record.engine], self._busy_from[record.engine] = 0.0, record.at
            self._left += self._tokens(record.sample)[1]  # what it lost is generated again
        if record.cause != "window":
            return
        self._findings.saw("I9", "handed over")
        if self._open or not self._others_can(record.sample, record.at):
            why = "while the window is open" if self._open else "and no other engine can go on with it"
            text = f"{record.engine} hands over sample {record.sample}, {why}"
            self._findings.broke("I9", record.at, text)

    def _check_stay(self, stay: _Stay, at: float) -> None:
        since = stay.overdue_since
        if since is not None and at > since + CLOCK_EPSILON_S:
            text = f"{stay.engine} has kept sample {stay.sample} for {at - since:.3f} s outside the window"
            self._findings.broke("I9", at, f"{text}, and others could go on with it")

    def _others_can(self, sample: str, at: float) -> bool:
        """Whether an engine that is not reserved serves a version that the sample may use, and is not pausing."""
        group = self._samples.live.get(split_sample_id(sample)[0])
        if group is None:
            return False
        low, high = group.submitted.min_version, group.submitted.max_version
        return any(
            engine.pool is not Pool.RESERVED
            and not engine.draining
            and engine.paused_until <= at
            and low <= engine.version <= high
            for engine in self._engines.live.values()
        )

    def _tokens(self, sample: str) -> tuple[int, int]:
        """Of a live sample: those to read before it goes on, and those that it may still get."""
        number, index = split_sample_id(sample)
        group = self._samples.live.get(number)
        if group is None:
            return 0, 0
        asked, told = group.submitted, group.samples[index]
        return asked.prompt_tokens + told.length, asked.max_new_tokens - told.generated
