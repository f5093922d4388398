"""Engines as an audit sees them: their leases, what they have verified, how they leave (I7, I8, part of I6)."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Final

from polyrl.ledger import events as f
from polyrl.ledger.audit.findings import Findings
from polyrl.ledger.causes import GoneCause, RestPhase
from polyrl.ledger.config import LedgerConfig
from polyrl.ledger.measures.rests import GIVE_UP_S
from polyrl.sample import Pool

TICK_S: Final = 0.2
"""What a tick may come later than its deadline: the ledger looks at deadlines 0.1 s apart, and a busy loop is late."""

LATE_TICK: Final = 0.5
"""A tick that is late by more than this share of a lease renews all leases instead of ending any."""

CLOCK_EPSILON_S: Final = 1e-6
"""Rounding of sums of seconds."""


@dataclass
class AuditedEngine:
    """One engine whose lease runs."""

    version: int
    max_running: int
    max_context: int
    pool: Pool = Pool.SPOT
    paused_until: float = -inf
    draining: bool = False
    silent: bool = False
    drain_at: float = 0.0
    holds_memory: bool = False
    """It can sleep on the trainer's devices, and does not."""
    heard_at: float = -inf
    """Its last sign of life; known once it is gone."""
    verified: set[int] = field(default_factory=set)
    running: set[int] = field(default_factory=set)

    def serve(self, version: int) -> None:
        """It serves `version` from now on; -1: nothing."""
        self.version = version
        if version >= 0:
            self.verified.add(version)


class EngineAudit:
    """All engines."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self.config = LedgerConfig(run_epoch=0)
        self.live: dict[str, AuditedEngine] = {}

    def greeted(self, event: f.EngineGreeted, at: float) -> None:
        self._findings.saw("I7", "greetings")
        capacity = event.capacity
        made = AuditedEngine(event.version, capacity.max_running, max_context=capacity.max_context)
        engine = self.live.setdefault(event.engine, made)
        engine.max_running, engine.max_context, engine.pool = capacity.max_running, capacity.max_context, event.pool
        engine.verified.update(event.versions)
        engine.holds_memory = event.sleeps and not event.asleep and event.pool is Pool.RESERVED
        engine.serve(event.version)

    def serving(self, event: f.EngineServing, at: float) -> None:
        engine = self._leased(event.engine, f"says that it serves version {event.version}", at)
        if engine is not None:
            engine.serve(event.version)

    def rests(self, event: f.EngineRests, at: float) -> None:
        engine = self._leased(event.engine, f"is {event.phase}", at)
        if engine is None:
            return
        engine.holds_memory = event.phase is not RestPhase.ASLEEP
        if event.phase is not RestPhase.AWAKE:
            engine.serve(-1)

    def quarantined(self, event: f.EngineQuarantined, at: float) -> None:
        engine = self._leased(event.engine, f"is quarantined for {event.cause}", at)
        if engine is not None:
            engine.paused_until = event.quarantined_until

    def draining(self, event: f.EngineDraining, at: float) -> None:
        engine = self._leased(event.engine, "is drained", at)
        if engine is None:
            return
        if engine.draining and event.drain_at > engine.drain_at + CLOCK_EPSILON_S:
            self._findings.broke("I7", at, f"the drain of {event.engine} is put off")
        engine.draining, engine.drain_at = True, event.drain_at

    def heard(self, event: f.EngineHeard, at: float) -> None:
        if event.engine in self.live:
            self.live[event.engine].heard_at = event.at

    def fell_silent(self, event: f.EngineSilent, at: float) -> None:
        engine = self._leased(event.engine, "falls silent", at)
        if engine is not None:
            engine.silent = True
            self._check_silence(event.engine, "falls silent", at - engine.heard_at, self.config.lease_s, at)

    def returned(self, event: f.EngineReturned, at: float) -> None:
        engine = self._leased(event.engine, "returns", at)
        if engine is not None:
            engine.silent = False

    def gone(self, event: f.EngineGone, at: float) -> None:
        engine = self._leased(event.engine, "leaves", at)
        self.live.pop(event.engine, None)
        if engine is None:
            return
        if engine.running:
            text = f"{event.engine} leaves with {len(engine.running)} assignments still running there"
            self._findings.broke("I7", at, text)
        if event.cause not in set(GoneCause):
            self._findings.broke("I7", at, f"{event.engine} leaves for {event.cause!r}, which is no cause")
        if event.cause == GoneCause.SILENT:
            self._findings.saw("I8", "silent ends")
            least = self.config.gone_s if engine.silent else self.config.lease_s  # before there were two stages
            # One that may hold the learner's devices is counted on for so long again after it is ordered to sleep.
            longest = 2 * GIVE_UP_S if engine.holds_memory else least
            self._check_silence(event.engine, "leaves", at - engine.heard_at, least, at, longest)

    def _check_silence(
        self, name: str, what: str, silence: float, least: float, at: float, longest: float | None = None
    ) -> None:
        if silence < least - CLOCK_EPSILON_S:
            self._findings.broke("I7", at, f"{name} {what} after {silence:.3f} s without a sign, before {least:g} s")
        due = least if longest is None else longest
        if silence > due + self.config.lease_s * LATE_TICK + TICK_S:
            self._findings.broke("I8", at, f"{name} {what} after {silence:.3f} s without a sign, due after {due:g} s")

    def assigned(self, event: f.Assigned, at: float, *, reclaimed: bool = False) -> None:
        """It gets one more assignment; or one back that it never stopped, which a drain does not forbid."""
        engine = self._leased(event.engine, f"is given sample {event.sample}", at)
        if engine is None:
            return
        if engine.draining and not reclaimed:
            self._findings.broke("I7", at, f"{event.engine} drains and is given sample {event.sample}")
        if engine.silent:
            self._findings.broke("I7", at, f"{event.engine} is silent and is given sample {event.sample}")
        if engine.paused_until > at and not reclaimed:
            self._findings.broke("I7", at, f"{event.engine} pauses and is given sample {event.sample}")
        if len(engine.running) >= engine.max_running:
            text = f"{event.engine} takes {engine.max_running} at once and is given sample {event.sample} on top"
            self._findings.broke("I7", at, text)
        engine.running.add(event.assignment)

    def assignment_ended(self, name: str, assignment: int) -> None:
        """One of its assignments is over."""
        if name in self.live:
            self.live[name].running.discard(assignment)

    def version_of(self, name: str) -> int:
        """What it serves; -1: nothing, or there is no such engine."""
        return self.live[name].version if name in self.live else -1

    def has_room(self, tokens: int, newest: int) -> bool:
        """Whether the context of an engine that may serve version `newest` or an older one holds more than `tokens`."""
        able = (engine for engine in self.live.values() if engine.version <= newest and not engine.draining)
        return any(engine.max_context > tokens for engine in able)

    def has_verified(self, name: str, version: int) -> bool:
        """Whether it has verified `version` under its present lease."""
        return name in self.live and version in self.live[name].verified

    def _leased(self, name: str, what: str, at: float) -> AuditedEngine | None:
        self._findings.saw("I7", "engine events")
        if name not in self.live:
            self._findings.broke("I7", at, f"{name} {what}, but no lease of it runs")
        return self.live.get(name)
