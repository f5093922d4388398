"""Who waits for whom, for what, since when and until when: the chain that `polyrl why` prints.

Refuses to hold: any wait without a deadline of its own or of the one who waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import msgspec

from polyrl.ledger.state import LedgerState, SamplePhase
from polyrl.ledger.status import awaited


class Wait(msgspec.Struct, frozen=True):
    """One wait; times are on the ledger's clock."""

    waiter: str
    awaited: str
    what: str
    since: float
    until: float | None
    """None: the waiter's own waiter has the deadline."""

    def sentence(self, now: float) -> str:
        """For people."""
        text = f"{self.waiter} waits for {self.what} from {self.awaited}, for {max(0.0, now - self.since):.1f} s so far"
        if self.until is None:
            return text
        left = self.until - now
        return f"{text}, at most {left:.1f} s more" if left >= 0 else f"{text}, {-left:.1f} s beyond its deadline"


def waits_of(state: LedgerState, now: float) -> list[Wait]:
    """Every wait, the longest first."""
    waits = [*_trainer_waits(state, now), *_queue_waits(state), *_engine_waits(state), *_verdict_waits(state)]
    return sorted(waits, key=lambda wait: wait.since)


def _trainer_waits(state: LedgerState, now: float) -> Iterator[Wait]:
    for pending in state.pending.values():
        request = pending.request
        what = f"batch of {request.min_samples} to {request.max_samples} samples"
        yield Wait("trainer", awaited(state, request.step, request.purpose, now), what, pending.since, pending.due)


def _queue_waits(state: LedgerState) -> Iterator[Wait]:
    waiting: dict[tuple[int, int], list[float]] = {}
    for sample in state.samples.values():
        if sample.phase is SamplePhase.WAITING:
            group = state.groups[sample.group].group
            waiting.setdefault((group.min_version, group.max_version), []).append(sample.since)
    for (low, high), since in waiting.items():
        names = [e.name for e in state.engines.values() if low <= e.version <= high and not e.draining]
        versions = f"version {low}" if low == high else f"a version from {low} to {high}"
        whom = ", ".join(names) if names else f"any engine that serves {versions} (there is none)"
        yield Wait(f"the queue ({len(since)} samples)", whom, "room", min(since), None)


def _engine_waits(state: LedgerState) -> Iterator[Wait]:
    config = state.config
    for engine in state.engines.values():
        yield Wait("manager", engine.name, "sign of life", engine.heard_at, engine.heard_at + config.lease_s)
        newest = state.version.version
        if engine.version < newest and not engine.draining:
            yield Wait("manager", engine.name, f"weight version {newest}", engine.greeted_at, None)
        if engine.running:
            oldest = min(state.assignments[number].progress_at for number in engine.running)
            what = f"tokens of {len(engine.running)} samples"
            yield Wait("manager", engine.name, what, oldest, oldest + config.progress_deadline_s)
        if engine.draining and -inf < engine.drain_at < inf:
            yield Wait("manager", engine.name, "end of its drain", engine.heard_at, engine.drain_at)


def _verdict_waits(state: LedgerState) -> Iterator[Wait]:
    since = [state.samples[name].since for name in state.asked]
    if since:
        due = min(state.samples[name].ask_due for name in state.asked)
        yield Wait("manager", "trainer", f"verdicts on {len(since)} turns", min(since), due)
