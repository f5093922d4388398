"""The ledger seen from outside: its counts, and who waits for whom. Computed when asked, stored nowhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import inf
from typing import Final

import msgspec

from polyrl.ledger.causes import RestPhase
from polyrl.ledger.measures.departures import pause_of
from polyrl.ledger.state import LeasedEngine, LedgerState, SamplePhase, SampleState, context_used, step_key
from polyrl.sample import Purpose, sample_id
from polyrl.status import MAX_MESSAGE, EngineState, EngineStatus, ManagerStatus, SampleCounts, TokenCounts

CLAIMS_NAMED: Final = 8
"""Engines whose contexts a sentence names."""


def manager_status(state: LedgerState, now: float, seq: int) -> ManagerStatus:
    """The whole run at one moment; `seq` numbers the status for those who wait for a newer one."""
    counters = state.counters
    return ManagerStatus(
        seq=seq,
        run_epoch=state.config.run_epoch,
        phase=state.phase,
        step=state.step,
        values=dict(state.values),
        weight_version=state.weights.version,
        engines=tuple(_engine_status(state, engine, now) for engine in state.engines.values()),
        engines_lost=counters.losses,
        samples=SampleCounts(
            submitted=counters.submitted,
            acknowledged=counters.acknowledged,
            open=len(state.samples) - sum(state.groups[n].group.n for kept in state.kept.values() for n in kept),
            offered_again=counters.offered_again,
            released_early=counters.released_early,
            discarded=dict(counters.discarded),
        ),
        tokens=TokenCounts(
            generated=counters.tokens_accepted + counters.tokens_in_vain,
            kept=counters.tokens_accepted,
            regenerated=counters.tokens_in_vain,
        ),
        delta_bytes=counters.delta_bytes,
        finished_steps=tuple(state.usage.finished),
        finished=state.finished,
        ok=state.ok,
        message=state.message[:MAX_MESSAGE],
    )


def _engine_status(state: LedgerState, engine: LeasedEngine, now: float) -> EngineStatus:
    departed = state.usage.departed.get(engine.name)
    return EngineStatus(
        name=engine.name,
        pool=engine.pool,
        state=_engine_state(engine, now),
        weight_version=engine.version,
        running=len(engine.running),
        max_running=engine.capacity.max_running,
        tokens=engine.tokens,
        departed="" if departed is None else departed.text,
    )


def _engine_state(engine: LeasedEngine, now: float) -> EngineState:
    if engine.silent:
        return EngineState.SILENT
    if engine.draining:
        return EngineState.DRAINING
    if engine.version < 0:
        return EngineState.JOINING
    return EngineState.SUSPECT if engine.unproven or engine.quarantined_until > now else EngineState.SERVING


def awaited(state: LedgerState, step: int, purpose: Purpose, now: float) -> str:
    """One sentence: who holds up a step, and since when."""
    entry = state.steps.get(step_key(step, purpose))
    if entry is None:
        return f"step {step} ({purpose}): no group was submitted"
    samples = [
        state.samples[sample_id(number, index)]
        for number, live in state.groups.items()
        if (live.group.step, live.group.purpose) == (step, purpose) and not live.ready
        for index in range(live.group.n)
    ]
    parts = [part for part in (_part(state, samples, phase, now) for phase in SamplePhase) if part]
    head = f"step {step} ({purpose}): {entry.open} of {entry.submitted} groups are open, {len(entry.ready)} ready"
    return "; ".join([head, *parts, *_sleep_waits(state, now)])


def _sleep_waits(state: LedgerState, now: float) -> Iterator[str]:
    """Engines on the learner's devices that were ordered to sleep, and have not: until then no batch is delivered."""
    for engine in state.engines.values():
        if engine.rest.phase is RestPhase.FALLING:
            yield f"a batch waits until {engine.name} sleeps, for {now - engine.rest.since:.1f} s"


def _part(state: LedgerState, samples: list[SampleState], phase: SamplePhase, now: float) -> str:
    those = [sample for sample in samples if sample.phase is phase]
    if not those or phase in (SamplePhase.SCORED, SamplePhase.PACKED, SamplePhase.KEPT):
        return ""
    oldest = now - min(sample.since for sample in those)
    if phase is SamplePhase.WAITING:
        return f"{len(those)} samples wait for an engine, the longest for {oldest:.1f} s"
    if phase is SamplePhase.TURN_DONE:
        return f"{len(those)} samples wait for a verdict of the trainer, the longest for {oldest:.1f} s"
    engines = Counter(state.assignments[sample.assignment].engine for sample in those)
    where = ", ".join(f"{count} on {name}" for name, count in sorted(engines.items()))
    return f"{len(those)} samples run ({where}), the longest for {oldest:.1f} s"


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
    waits = [*_trainer_waits(state, now), *_queue_waits(state), *_refusal_waits(state), *_context_waits(state)]
    waits += [*_engine_waits(state, now), *_verdict_waits(state)]
    return sorted(waits, key=lambda wait: wait.since)


def _trainer_waits(state: LedgerState, now: float) -> Iterator[Wait]:
    for pending in state.pending.values():
        request = pending.request
        what = f"batch of {request.min_samples} to {request.max_samples} samples"
        yield Wait(
            "trainer",
            awaited(state, request.step, request.purpose, now),
            what=what,
            since=pending.since,
            until=pending.due,
        )


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
        yield Wait(f"the queue ({len(since)} samples)", whom, what="room", since=min(since), until=None)


def _refusal_waits(state: LedgerState) -> Iterator[Wait]:
    """Samples that too few engines have refused to be believed."""
    refused: dict[tuple[str, ...], list[float]] = {}
    for number in (number for *_, number in state.queue):
        entry = state.groups[number]
        for sample in (state.samples[sample_id(number, index)] for index in entry.waiting):
            if sample.rejected_by:
                refused.setdefault(tuple(sample.rejected_by), []).append(sample.refused_at)
    for names, since in refused.items():
        yield Wait(
            f"{len(since)} samples that {', '.join(names)} refused",
            "an engine that has not refused them, or these once more before their groups are dropped",
            what="room",
            since=min(since),
            until=min(since) + state.config.refusal_deadline_s,
        )


def _context_waits(state: LedgerState) -> Iterator[Wait]:
    """Samples that no engine here says that it can hold, and that the model and the manifest allow."""
    claims = {engine.name: engine.capacity.max_context for engine in state.engines.values() if not engine.draining}
    waiting = [sample for sample in state.samples.values() if sample.phase is SamplePhase.WAITING]
    long = [sample for sample in waiting if context_used(state, sample) >= max(claims.values(), default=inf)]
    if long:
        claimed = ", ".join(f"{name} {context}" for name, context in sorted(claims.items())[:CLAIMS_NAMED])
        allowed = (
            f"the model and rollout.engine.maxContext allow {state.config.allowed_context(state.weights.positions)}"
        )
        yield Wait(
            f"{len(long)} samples of up to {max(context_used(state, sample) for sample in long)} tokens",
            f"an engine that holds as many ({allowed}; engines say that they hold {claimed})",
            what="room",
            since=min(sample.since for sample in long),
            until=None,
        )


def _engine_waits(state: LedgerState, now: float) -> Iterator[Wait]:
    config = state.config
    for engine in state.engines.values():
        until = engine.heard_at + (config.gone_s if engine.silent else config.lease_s)
        yield Wait("manager", engine.name, what="sign of life", since=engine.heard_at, until=until)
        departed = state.usage.departed.get(engine.name)
        if departed is not None and departed.until > now:
            what = f"the end of its pause, for its tokens are not the policy's ({departed.text})"
            since = departed.until - pause_of(departed.times)
            yield Wait(engine.name, "manager", what=what, since=since, until=departed.until)
        newest = state.weights.version
        if engine.version < newest and not engine.draining:
            yield Wait("manager", engine.name, what=f"weight version {newest}", since=engine.greeted_at, until=None)
        if engine.running:
            oldest = min(state.assignments[number].progress_at for number in engine.running)
            what = f"tokens of {len(engine.running)} samples"
            yield Wait("manager", engine.name, what=what, since=oldest, until=oldest + config.progress_deadline_s)
        if engine.draining and -inf < engine.drain_at < inf:
            yield Wait("manager", engine.name, what="end of its drain", since=engine.heard_at, until=engine.drain_at)


def _verdict_waits(state: LedgerState) -> Iterator[Wait]:
    since = [state.samples[name].since for name in state.awaiting_verdict]
    if since:
        due = min(state.samples[name].ask_due for name in state.awaiting_verdict)
        yield Wait("manager", "trainer", what=f"verdicts on {len(since)} turns", since=min(since), until=due)
