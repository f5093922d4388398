"""Engines in an audit's books: under which lease each works, what it has verified, how it leaves. Part of `audit`.

Refuses to hold: tokens (see `audit_samples`). Read next: `audit_samples`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Final

from polyrl.ledger.audit import records as r
from polyrl.ledger.audit.findings import Findings
from polyrl.ledger.config import LedgerConfig
from polyrl.sample import Pool

GONE_CAUSES: Final = ("bye", "silent")

TICK_S: Final = 0.2
"""What a tick may come later than its deadline: the ledger looks at deadlines 0.1 s apart, and a busy loop is late."""

LATE_TICK: Final = 0.5
"""A tick that is late by more than this share of a lease renews all leases instead of ending any."""

CLOCK_EPSILON_S: Final = 1e-6
"""Rounding of sums of seconds."""


@dataclass
class EngineBook:
    """One engine whose lease runs."""

    version: int
    max_running: int
    pool: Pool = Pool.SPOT
    paused_until: float = -inf
    draining: bool = False
    drain_at: float = 0.0
    verified: set[int] = field(default_factory=set)
    running: set[int] = field(default_factory=set)


class EngineBooks:
    """All engines; checks I7, I8 and the engine's side of I6."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self.config = LedgerConfig(run_epoch=0)
        self.live: dict[str, EngineBook] = {}

    def greeted(self, record: r.Greeted) -> None:
        self._findings.saw("I7", "greetings")
        engine = self.live.setdefault(record.engine, EngineBook(record.version, record.max_running))
        engine.max_running, engine.pool = record.max_running, record.pool
        _serve(engine, record.version)

    def serving(self, record: r.Serving) -> None:
        engine = self._leased(record, f"says that it serves version {record.version}")
        if engine is not None:
            _serve(engine, record.version)

    def struck(self, record: r.Struck) -> None:
        engine = self._leased(record, f"is struck for {record.cause}")
        if engine is not None:
            engine.paused_until = record.until

    def trusted(self, record: r.Trusted) -> None:
        engine = self._leased(record, "is trusted again")
        if engine is not None:
            engine.paused_until = -inf

    def draining(self, record: r.Draining) -> None:
        engine = self._leased(record, "is drained")
        if engine is None:
            return
        if engine.draining and record.drain_at > engine.drain_at + CLOCK_EPSILON_S:
            self._findings.broke("I7", record.at, f"the drain of {record.engine} is put off")
        engine.draining, engine.drain_at = True, record.drain_at

    def gone(self, record: r.Gone) -> None:
        engine = self._leased(record, "leaves")
        self.live.pop(record.engine, None)
        if engine is None:
            return
        if engine.running:
            text = f"{record.engine} leaves with {len(engine.running)} assignments still running there"
            self._findings.broke("I7", record.at, text)
        if record.cause not in GONE_CAUSES:
            self._findings.broke("I7", record.at, f"{record.engine} leaves for {record.cause!r}, which is no cause")
        if record.cause == "silent":
            self._silent(record)

    def _silent(self, record: r.Gone) -> None:
        self._findings.saw("I8", "silent ends")
        silence, lease = record.at - record.heard_at, self.config.lease_s
        if silence < lease - CLOCK_EPSILON_S:
            text = f"{record.engine} is called silent after {silence:.3f} s; its lease is {lease:g} s"
            self._findings.broke("I7", record.at, text)
        if silence > lease * (1 + LATE_TICK) + TICK_S:
            text = f"{record.engine} leaves after {silence:.3f} s of silence; its lease is {lease:g} s"
            self._findings.broke("I8", record.at, text)

    def assigned(self, record: r.Assigned) -> None:
        """It gets one more assignment."""
        engine = self._leased(record, f"is given sample {record.sample}")
        if engine is None:
            return
        if engine.draining:
            self._findings.broke("I7", record.at, f"{record.engine} drains and is given sample {record.sample}")
        if len(engine.running) >= engine.max_running:
            text = f"{record.engine} takes {engine.max_running} at once and is given sample {record.sample} on top"
            self._findings.broke("I7", record.at, text)
        engine.running.add(record.assignment)

    def ended(self, record: r.OfAssignment) -> None:
        """One of its assignments is over."""
        engine = self.live.get(record.engine)
        if engine is not None:
            engine.running.discard(record.assignment)

    def verified(self, name: str, version: int) -> bool:
        """Whether it has verified `version` under its present lease."""
        engine = self.live.get(name)
        return engine is not None and version in engine.verified

    def _leased(self, record: r.OfLease, what: str) -> EngineBook | None:
        self._findings.saw("I7", "engine events")
        engine = self.live.get(record.engine)
        if engine is None:
            self._findings.broke("I7", record.at, f"{record.engine} {what}, but no lease of it runs")
        return engine


def _serve(engine: EngineBook, version: int) -> None:
    engine.version = version
    if version >= 0:
        engine.verified.add(version)
