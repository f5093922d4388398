"""Deadlines: leases, drains, progress, repeated questions, late answers. All are looked through in one `tick`.

An engine's silence counts only while we were listening: if the tick itself comes long after it was due, this process
was stopped or starved, and every lease is renewed instead of a whole healthy fleet being declared dead.

Refuses to hold: clocks (`now` is an argument). Read next: `placement`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, isfinite
from typing import Final

from polyrl.ledger.batching.discards import discard_group
from polyrl.ledger.batching.packing import close_late
from polyrl.ledger.decision import Decision
from polyrl.ledger.events import (
    DrainExpired,
    EngineDraining,
    EngineGone,
    LeasesRenewed,
    Ticked,
    TurnAsked,
    WeightsAwaited,
)
from polyrl.ledger.responses import turn_done
from polyrl.ledger.scheduling.moves import move, strike
from polyrl.ledger.scheduling.stragglers import look_for_stragglers
from polyrl.ledger.state import Assignment, State
from polyrl.sample import DiscardReason
from polyrl.wire import Announce, Drain

TICK_RESOLUTION_S: Final = 0.1
"""Deadlines that fall closer together are looked at together; a tick reads every live sample."""

READING_SHARE: Final = 4
"""Progress deadlines that a sample waits for its first token while its engine reads others: sixteen 32k prompts."""


def tick(d: Decision) -> None:
    """Everything whose time has come."""
    if d.now - d.state.due > d.config.lease_s / 2:
        d.record(LeasesRenewed(d.now))
    _end_leases(d)
    _end_drains(d)
    _find_stalled(d)
    look_for_stragglers(d)
    _announce_again(d)
    _ask_again(d)
    close_late(d)
    earliest = min(_deadlines(d.state, d.now), default=inf)
    d.record(Ticked(max(earliest, d.now + TICK_RESOLUTION_S)))


def lose_engine(d: Decision, name: str, cause: str) -> None:
    """An engine is gone: its samples move, its name is forgotten."""
    for number in tuple(d.state.engines[name].running):
        move(d, number, "lost", cancel=False)
    d.record(EngineGone(name, cause, d.now))


def drain_engine(d: Decision, name: str, deadline_s: float, reason: str) -> None:
    """No new work for it; the earlier deadline wins; Drain is sent only when that changes something."""
    engine = d.state.engines.get(name)
    if engine is None:
        d.ignore("drainOfUnknownEngine")
        return
    drain_at = d.now + max(0.0, deadline_s if isfinite(deadline_s) else 0.0)
    if engine.draining and drain_at >= engine.drain_at:
        return
    d.record(EngineDraining(name, drain_at, engine.draining or reason or "no reason given", d.now))
    d.tell(name, Drain(drain_at - d.now, engine.draining))


def announce(d: Decision, name: str) -> None:
    """Tells an engine of the newest version, if there is one."""
    version = d.state.version
    if version.version >= 0:
        d.tell(name, Announce(version.version, version.endpoint, version.public_key, version.manifest_hash))


def _end_leases(d: Decision) -> None:
    for engine in tuple(d.state.engines.values()):
        if engine.heard_at + d.config.lease_s <= d.now:
            lose_engine(d, engine.name, "silent")


def _end_drains(d: Decision) -> None:
    for engine in d.state.engines.values():
        if -inf < engine.drain_at <= d.now:
            for number in tuple(engine.running):
                move(d, number, "draining")
            d.record(DrainExpired(engine.name))


def _find_stalled(d: Decision) -> None:
    """Moves samples without progress; their engine is suspect if it gave no token to anyone for as long."""
    limit = d.now - d.config.progress_deadline_s
    stalled = [
        (number, a.engine) for number, a in d.state.assignments.items() if _progress_deadline(d.state, a) <= d.now
    ]
    for name in {engine: None for _, engine in stalled}:
        if d.state.engines[name].token_at <= limit:
            strike(d, name, "stalled", d.config.progress_deadline_s)
    for number, _ in stalled:
        move(d, number, "stalled")


def _progress_deadline(state: State, assignment: Assignment) -> float:
    """A sample that waits for its first token counts from the last prompt that its engine has read, within bounds."""
    patience = state.config.progress_deadline_s
    if assignment.progress_at > assignment.at:
        return assignment.progress_at + patience
    read_at = state.engines[assignment.engine].read_at
    return min(max(assignment.progress_at, read_at) + patience, assignment.progress_at + READING_SHARE * patience)


def _announce_again(d: Decision) -> None:
    for engine in d.state.engines.values():
        if engine.weights_at <= d.now:
            d.record(WeightsAwaited(engine.name, inf))
            announce(d, engine.name)


def _ask_again(d: Decision) -> None:
    if not isfinite(d.state.trainer_at):
        return  # its greeting asks for everything that is open
    listens = d.now - d.state.trainer_at <= d.config.lease_s
    for name in tuple(d.state.asked):
        sample = d.state.samples.get(name)
        if sample is None or sample.ask_due > d.now:
            continue  # a sibling took it along, or it is not its time
        waited = d.now - max(sample.since, d.state.trainer_since)
        if listens and waited >= d.config.verdict_deadline_s:
            text = f"the trainer gave no verdict on turn {sample.turn} within {waited:.0f} s, asked {sample.asks} times"
            discard_group(d, sample.group, DiscardReason.REWARD_TIMED_OUT, name, text)
            continue
        pause = min(d.config.turn_resend_s * 2.0 ** min(sample.asks, 16), d.config.turn_resend_max_s)
        d.record(TurnAsked(name, d.now + pause))
        d.answer(turn_done(d.state, name))


def _deadlines(state: State, now: float) -> Iterator[float]:
    config = state.config
    for engine in state.engines.values():
        yield engine.heard_at + config.lease_s
        yield engine.weights_at
        if engine.drain_at > now:
            yield engine.drain_at
        if engine.trusted_at > now:
            yield engine.trusted_at
    for assignment in state.assignments.values():
        yield _progress_deadline(state, assignment)
    if isfinite(state.trainer_at):
        for name in state.asked:
            yield state.samples[name].ask_due
    for pending in state.pending.values():
        yield pending.due
