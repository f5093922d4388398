"""The ledger seen from outside: counts, engines, steps, and who is awaited. Computed when asked, stored nowhere.

Refuses to hold: the HTTP form (see `polyrl.status`). Read next: `waits`.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from polyrl.ledger.state import LeasedEngine, LedgerState, SamplePhase, SampleState, StepState, step_key
from polyrl.sample import Pool, Purpose, sample_id


class SampleTally(msgspec.Struct, frozen=True):
    """submitted = sum(live) + acknowledged + sum(discarded), always."""

    submitted: int
    live: dict[str, int]
    """By SamplePhase; every phase is named."""
    acknowledged: int
    discarded: dict[str, int]
    """By DiscardReason."""


class TokenTally(msgspec.Struct, frozen=True):
    """generated = kept + regenerated; repeated ones came over the wire twice but were generated once."""

    generated: int
    kept: int
    """Accepted into a sample."""
    regenerated: int
    """Received for assignments that were over: another engine generated them again."""
    repeated: int


class EngineView(msgspec.Struct, frozen=True):
    """One engine whose lease runs."""

    name: str
    pool: Pool
    state: str
    """`joining` (serves nothing yet), `serving`, `suspect` (failed, pauses or proves itself) or `draining`."""
    running: int
    max_running: int
    version: int
    tokens: int
    """Accepted since it greeted."""
    tokens_per_s: float
    queued: int
    kv_free_tokens: int
    """As it last said."""


class StepProgress(msgspec.Struct, frozen=True):
    """Groups of one step and purpose: submitted = open + ready + packed + acknowledged + dropped."""

    step: int
    purpose: Purpose
    submitted: int
    open: int
    ready: int
    packed: int
    acknowledged: int
    dropped: int


class LedgerStatus(msgspec.Struct, frozen=True):
    """Everything at one moment."""

    run_epoch: int
    samples: SampleTally
    tokens: TokenTally
    delta_bytes: int
    """Bytes of the columns of all Deltas; divided by tokens generated it is what a token costs on the wire."""
    delta_frames: int
    delta_rows: int
    engines: tuple[EngineView, ...]
    migrations: dict[str, int]
    """Assignments that ended unfinished, by cause."""
    losses: int
    """Engines that went without a Bye."""
    steps: tuple[StepProgress, ...]
    """Oldest first."""
    version: int
    """Newest published; -1: none."""
    window_open: bool
    phase: str
    step: int
    values: dict[str, float]
    """The trainer's newest Report."""
    ignored: dict[str, int]
    """Messages without effect, by kind."""
    finished: bool
    ok: bool
    message: str


def status_of(state: LedgerState, now: float) -> LedgerStatus:
    """The whole picture."""
    counters = state.counters
    live = Counter(sample.phase.value for sample in state.samples.values())
    return LedgerStatus(
        run_epoch=state.config.run_epoch,
        samples=SampleTally(
            submitted=counters.submitted,
            live={phase.value: live[phase.value] for phase in SamplePhase},
            acknowledged=counters.acknowledged,
            discarded=dict(counters.discarded),
        ),
        tokens=TokenTally(
            generated=counters.tokens_accepted + counters.tokens_in_vain,
            kept=counters.tokens_accepted,
            regenerated=counters.tokens_in_vain,
            repeated=counters.tokens_repeated,
        ),
        delta_bytes=counters.delta_bytes,
        delta_frames=counters.delta_frames,
        delta_rows=counters.delta_rows,
        engines=tuple(_engine_view(engine, now) for engine in state.engines.values()),
        migrations=dict(counters.migrations),
        losses=counters.losses,
        steps=tuple(_progress(step) for step in sorted(state.steps.values(), key=lambda s: (s.step, s.purpose))),
        version=state.version.version,
        window_open=state.window_open,
        phase=state.phase,
        step=state.step,
        values=dict(state.values),
        ignored=dict(counters.ignored),
        finished=state.finished,
        ok=state.ok,
        message=state.message,
    )


def engine_state(engine: LeasedEngine, now: float) -> str:
    """One word for people."""
    if engine.draining:
        return "draining"
    if engine.version < 0:
        return "joining"
    return "suspect" if engine.failures or engine.straggler or engine.quarantined_until > now else "serving"


def _engine_view(engine: LeasedEngine, now: float) -> EngineView:
    return EngineView(
        name=engine.name,
        pool=engine.pool,
        state=engine_state(engine, now),
        running=len(engine.running),
        max_running=engine.max_running,
        version=engine.version,
        tokens=engine.tokens,
        tokens_per_s=engine.tokens_per_s if engine.running else 0.0,
        queued=engine.load[1],
        kv_free_tokens=engine.load[2],
    )


def _progress(step: StepState) -> StepProgress:
    return StepProgress(
        step=step.step,
        purpose=step.purpose,
        submitted=step.submitted,
        open=step.open,
        ready=len(step.ready),
        packed=step.packed,
        acknowledged=step.acknowledged,
        dropped=step.dropped,
    )


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
    return "; ".join([head, *parts])


def _part(state: LedgerState, samples: list[SampleState], phase: SamplePhase, now: float) -> str:
    those = [sample for sample in samples if sample.phase is phase]
    if not those or phase in (SamplePhase.SCORED, SamplePhase.PACKED):
        return ""
    oldest = now - min(sample.since for sample in those)
    if phase is SamplePhase.WAITING:
        return f"{len(those)} samples wait for an engine, the longest for {oldest:.1f} s"
    if phase is SamplePhase.TURN_DONE:
        return f"{len(those)} samples wait for a verdict of the trainer, the longest for {oldest:.1f} s"
    engines = Counter(state.assignments[sample.assignment].engine for sample in those)
    where = ", ".join(f"{count} on {name}" for name, count in sorted(engines.items()))
    return f"{len(those)} samples run ({where}), the longest for {oldest:.1f} s"
