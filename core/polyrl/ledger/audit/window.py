"""The reserved window as an audit sees it: who generates on the trainer's devices, when, and for how long (I9).

Three things must hold. Outside the window, while the trainer learns, reserved engines get nothing that others could
take. What is learned where there is no room beside engines is given when those that can sleep do.
And a window that closes was never used for longer than the work takes that was left in it, at the speed measured by
then (one that closes before any was measured is not timed):

    busy seconds of each engine <= PACE_SLACK * (tokens left * token_s + tokens read * read_s)
                                   + ASSIGNMENT_S * assignments + progress_deadline_s

The right side lets one engine do all work, one sample after the other, so it needs no guess at who takes what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from polyrl.ledger import events as f
from polyrl.ledger.audit.engines import EngineAudit
from polyrl.ledger.audit.findings import Findings
from polyrl.ledger.audit.samples import SampleAudit
from polyrl.ledger.causes import MoveCause
from polyrl.sample import Pool

PACE_SLACK: Final = 2.0
"""What a token may take more than was measured: the measurement is a mean over the last seconds."""

ASSIGNMENT_S: Final = 1.0
"""What an assignment may take besides its tokens: its messages, a sync of the disk, and frames that are gathered for a
tenth of a second. Short turns of a fast engine take little else."""

KEPT_CAUSES: Final = (MoveCause.WINDOW, MoveCause.REBALANCED, MoveCause.DRAINING)
"""Causes of moves from an engine that worked as it should; all others may cost it tokens and time."""


@dataclass
class _Stay:
    """One assignment on a reserved engine."""

    engine: str
    sample: str


class WindowAudit:
    """The window, and all that reserved engines run. To be called after the other audits; of ends before them."""

    def __init__(self, findings: Findings, engines: EngineAudit, samples: SampleAudit) -> None:
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
        self._given = 0
        """Assignments on reserved engines in this window."""

    def window_set(self, event: f.WindowSet, at: float) -> None:
        if event.open == self._open:
            return
        self._open = event.open
        if event.open:
            self._begin(at)
        else:
            self._close(event, at)

    def submitted(self, event: f.GroupSubmitted) -> None:
        self._left += event.group.n * event.group.sampling.max_new_tokens

    def packed(self, event: f.BatchPacked, at: float) -> None:
        if not (event.groups and event.wanted.alone):
            return
        self._findings.saw("I9", "batches that need the devices alone")
        awake = [name for name, engine in self._engines.live.items() if engine.holds_memory]
        if awake:
            text = f"batch {event.batch} needs the devices alone, and {', '.join(awake)} held memory there"
            self._findings.broke("I9", at, text)

    def assigned(self, event: f.Assigned, at: float) -> None:
        engine = self._engines.live.get(event.engine)
        if engine is None or engine.pool is not Pool.RESERVED:
            return
        self._findings.saw("I9", "reserved assignments")
        if not self._open and self._others_can(event.sample, at):
            text = f"{event.engine} is given sample {event.sample} outside the window, and others could take it"
            self._findings.broke("I9", at, text)
        self._stays[event.assignment] = _Stay(event.engine, event.sample)
        self._busy_from.setdefault(event.engine, at)
        self._read += self._tokens(event.sample)[0]
        self._given += 1

    def ended(self, assignment: int, cause: MoveCause | None, at: float) -> None:
        """`cause`: of a move; None for other ends."""
        stay = self._stays.pop(assignment, None)
        if stay is None:
            return
        if cause is not None:
            self._moved(stay, cause, at)
        if all(other.engine != stay.engine for other in self._stays.values()):
            self._pause(stay.engine, at)

    def renewed(self, at: float) -> None:
        """The manager had been away: what went on meanwhile says nothing of anybody's speed."""
        self._busy.clear()
        self._busy_from = dict.fromkeys(self._busy_from, at)

    def gone(self, engine: str) -> None:
        self._busy.pop(engine, None)
        self._busy_from.pop(engine, None)

    def _begin(self, at: float) -> None:
        self._busy.clear()
        self._busy_from = dict.fromkeys(self._busy_from, at)
        self._read = sum(self._tokens(stay.sample)[0] for stay in self._stays.values())
        self._given = len(self._stays)
        self._left = sum(group.tokens_left for group in self._samples.live.values())

    def _close(self, event: f.WindowSet, at: float) -> None:
        self._findings.saw("I9", "windows")
        running = dict(self._busy_from)
        for name in running:
            self._pause(name, at)
            self._busy_from[name] = at
        if not event.token_s:
            return
        self._findings.saw("I9", "windows at a measured speed")
        work = self._left * event.token_s + self._read * event.read_s
        bound = PACE_SLACK * work + ASSIGNMENT_S * self._given + self._engines.config.progress_deadline_s
        for name, busy in self._busy.items():
            if busy > bound:
                text = f"{name} was busy for {busy:.3f} s of a window whose {self._left} tokens take {work:.3f} s"
                self._findings.broke("I9", at, text)

    def _pause(self, name: str, at: float) -> None:
        began = self._busy_from.pop(name, at)
        self._busy[name] = self._busy.get(name, 0.0) + max(0.0, at - began)

    def _moved(self, stay: _Stay, cause: MoveCause, at: float) -> None:
        if cause not in KEPT_CAUSES:
            self._busy[stay.engine], self._busy_from[stay.engine] = 0.0, at
            self._left += self._tokens(stay.sample)[1]  # what it lost is generated again

    def _others_can(self, name: str, at: float) -> bool:
        """Whether an engine that is not reserved serves a version that the sample may use, and is not pausing."""
        found = self._samples.find(name)
        return found is not None and any(
            engine.pool is not Pool.RESERVED
            and not engine.draining
            and not engine.silent
            and engine.paused_until <= at
            and found[0].allows(engine.version)
            for engine in self._engines.live.values()
        )

    def _tokens(self, name: str) -> tuple[int, int]:
        """Tokens of a live sample: those to read before it goes on, and those that it may still get."""
        found = self._samples.find(name)
        if found is None:
            return 0, 0
        group, sample = found
        return group.prompt_tokens + sample.length, group.budget - sample.generated
