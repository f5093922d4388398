"""Deadlines: leases, drains, progress, repeated questions, late answers. All are looked through in one `tick`.

An engine's silence counts only while we were listening: if any input comes long after a tick was due, this process was
stopped or starved, and every lease is renewed instead of a whole healthy fleet being declared dead. Nor is what passed
meanwhile the time that engines took for the tokens which lie in our sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, isfinite
from typing import Final

from polyrl.ledger import events
from polyrl.ledger.batching import close_late, discard_group
from polyrl.ledger.causes import GoneCause, MoveCause, RestPhase
from polyrl.ledger.config import LedgerConfig
from polyrl.ledger.scheduling.moves import move, quarantine
from polyrl.ledger.scheduling.rebalance import SCAN_PAUSE_S
from polyrl.ledger.scheduling.rests import held_until, overdue
from polyrl.ledger.state import Assignment, LeasedEngine, LedgerState
from polyrl.ledger.transition import Transition
from polyrl.sample import DiscardReason, Pool
from polyrl.wire import Announce, Fenced, StartDrain, TurnsAwaited

TICK_RESOLUTION_S: Final = 0.1
"""Deadlines that fall closer together are looked at together."""

LONGEST_DRAIN_S: Final = 86_400.0
"""No notice is longer."""

SOONER_SHARE: Final = 0.01
"""A drain's deadline changes when a new one is sooner by this share of what is left: so it can change some thousand
times and no more, however often an agent says so."""

READING_SHARE: Final = 4
"""Progress deadlines that a sample waits for its first token while its engine reads others: sixteen 32k prompts."""


def tick(transition: Transition) -> None:
    """Everything whose time has come."""
    transition.fleet.absence_noticed = False
    _end_leases(transition)
    _end_drains(transition)
    _end_disobedient(transition)
    stall_due = _find_stalled(transition)
    _announce_again(transition)
    ask_due = _ask_again(transition)
    close_late(transition)
    earliest = min(_deadlines(transition.state, transition.now), default=inf)
    listened_to = ask_due if isfinite(transition.state.trainer_at) else inf
    due = max(min(earliest, stall_due, listened_to), transition.now + TICK_RESOLUTION_S)
    transition.record(events.Ticked(due, stall_due, ask_due=ask_due))


def notice_absence(transition: Transition) -> None:
    """Before any input: frames that have piled up may be read before the tick that is late. Once until that tick,
    however many they are and whatever they make due."""
    if not transition.fleet.absence_noticed and transition.now - transition.state.due > transition.config.lease_s / 2:
        transition.fleet.absence_noticed = True
        transition.record(events.LeasesRenewed(transition.now))


def lose_engine(transition: Transition, name: str, cause: GoneCause) -> None:
    """An engine is gone: its samples move, its name is forgotten."""
    _move_all(transition, transition.state.engines[name])
    transition.record(events.EngineGone(name, cause, at=transition.now))


def _move_all(transition: Transition, engine: LeasedEngine) -> None:
    for number in tuple(engine.running):
        move(transition, number, MoveCause.LOST, cancel=False)


def drain_engine(transition: Transition, name: str, *, deadline_s: float, reason: str) -> None:
    """No new work for it; the earlier deadline wins; StartDrain is sent only when that changes something."""
    engine, now = transition.state.engines.get(name), transition.now
    if engine is None:
        transition.ignore("drainOfUnknownEngine")
        return
    seconds = min(LONGEST_DRAIN_S, max(0.0, deadline_s if isfinite(deadline_s) else 0.0))
    drain_at = now + seconds
    if engine.draining and drain_at >= engine.drain_at - SOONER_SHARE * max(0.0, engine.drain_at - now):
        return
    why = "" if engine.draining else reason or "no reason given"
    transition.record(events.EngineDraining(name, drain_at, reason=why, at=now))
    transition.send(name, StartDrain(drain_at - now, engine.draining))


def announce(transition: Transition, name: str) -> None:
    """Tells an engine of the newest version, if there is one."""
    newest = transition.state.weights
    if newest.version >= 0:
        transition.send(name, Announce.of(newest))


def _end_leases(transition: Transition) -> None:
    """In two stages: no new work, and what gains by it moves (see `placement`); then the engine is gone."""
    config, now = transition.config, transition.now
    for engine in tuple(transition.state.engines.values()):
        if not engine.silent and engine.heard_at + config.lease_s <= now:
            transition.record(events.EngineSilent(engine.name, now))
        if engine.heard_at + config.gone_s > now:
            continue
        if held_until(engine) <= now:
            lose_engine(transition, engine.name, GoneCause.SILENT)
        else:
            _move_all(transition, engine)


def _end_drains(transition: Transition) -> None:
    for engine in transition.state.engines.values():
        if -inf < engine.drain_at <= transition.now:
            for number in tuple(engine.running):
                move(transition, number, MoveCause.DRAINING)
            transition.record(events.DrainExpired(engine.name))


def _end_disobedient(transition: Transition) -> None:
    """Who does not sleep in time is taken for broken: the learner waits no longer. Who does not wake in time says anew
    what it is."""
    for engine in overdue(transition):
        falls = engine.rest.phase is RestPhase.FALLING
        text = "it did not sleep in time" if falls else "it did not wake in time"
        transition.send(engine.name, Fenced(text, lease_over=not falls))
        lose_engine(transition, engine.name, GoneCause.AWAKE if falls else GoneCause.ASLEEP)


def _find_stalled(transition: Transition) -> float:
    """Moves samples without progress; their engine is suspect if it gave no token to anyone for as long. Returns when
    the next look is due: progress only puts it off, so between two looks no running sample is read."""
    state, now, deadline_s = transition.state, transition.now, transition.config.progress_deadline_s
    if now < state.stall_due:
        return state.stall_due
    numbers = transition.fleet.progress.some(state.assignments, now)
    running = [state.assignments[number] for number in numbers if number in state.assignments]
    dues = [(_progress_deadline(state, assignment), assignment.engine) for assignment in running]
    for name in dict.fromkeys(engine for due, engine in dues if due <= now):
        if state.engines[name].token_at <= now - deadline_s:
            quarantine(transition, name, MoveCause.STALLED, first_pause_s=deadline_s)
        for number in tuple(state.engines[name].running):  # all at once, so that it fails once
            if _progress_deadline(state, state.assignments[number]) <= now:
                move(transition, number, MoveCause.STALLED)
    return transition.fleet.progress.due_after(numbers, (due for due, _ in dues if due > now), now, deadline_s)


def _progress_deadline(state: LedgerState, assignment: Assignment) -> float:
    """A sample that waits for its first token counts from the last prompt that its engine has read, within bounds."""
    allowed = state.config.progress_deadline_s
    engine, progress_at = state.engines[assignment.engine], assignment.progress_at
    if engine.pool is Pool.RESERVED:
        if not state.window_open:
            return inf  # its devices learn
        progress_at = max(progress_at, state.window_at)
    if assignment.progress_at > assignment.at:
        return progress_at + allowed
    return min(max(progress_at, engine.read_at) + allowed, progress_at + READING_SHARE * allowed)


def _announce_again(transition: Transition) -> None:
    for engine in transition.state.engines.values():
        if engine.weights_at <= transition.now:
            transition.record(events.WeightsAwaited(engine.name, inf))
            announce(transition, engine.name)


def _ask_again(transition: Transition) -> float:
    """Asks for what is late; returns when the next verdict is: between two looks no sample is read."""
    state, config, now = transition.state, transition.config, transition.now
    if now < state.ask_due or not isfinite(state.trainer_at):  # its greeting asks for everything that is open
        return state.ask_due
    listens = now - state.trainer_at <= config.lease_s
    names, again = transition.fleet.questions.some(state.awaiting_verdict, now), list[tuple[str, int]]()
    for name in names:
        sample = state.samples[name] if name in state.awaiting_verdict else None
        if sample is None or sample.ask_due > now:
            continue  # it has its verdict, a sibling took it along, or it is not its time
        waited = now - max(sample.since, state.trainer_since)
        if listens and waited >= config.verdict_deadline_s:
            text = f"the trainer gave no verdict on turn {sample.turn} within {waited:.0f} s, asked {sample.asks} times"
            discard_group(transition, sample.group, DiscardReason.REWARD_TIMED_OUT, culprit=name, detail=text)
            continue
        pause = min(config.turn_resend_s * 2.0 ** min(sample.asks, 16), config.turn_resend_max_s)
        transition.record(events.VerdictRequested(name, now + pause))
        again.append((name, sample.turn))
    if again:
        transition.answer(TurnsAwaited(tuple(again)))
    dues = (state.samples[name].ask_due for name in names if name in state.awaiting_verdict)
    return transition.fleet.questions.due_after(names, dues, now, shortest_s=config.turn_resend_s)


def _lease_ends(engine: LeasedEngine, config: LedgerConfig, now: float) -> float:
    """When its next stage ends."""
    if not engine.silent:
        return min(engine.heard_at, now) + config.lease_s  # after a restart it has longer, but only until it is heard
    moved_at = engine.heard_at + config.gone_s
    return moved_at if moved_at > now else held_until(engine)


def _deadlines(state: LedgerState, now: float) -> Iterator[float]:
    config = state.config
    for engine in state.engines.values():
        yield _lease_ends(engine, config, now)
        yield engine.weights_at
        yield engine.rest.due
        if engine.drain_at > now:
            yield engine.drain_at
        if engine.quarantined_until > now:
            yield engine.quarantined_until
    for pending in state.pending.values():
        yield pending.due
    # Looks that are put off: a tick that comes for another reason meanwhile must not forget them.
    for put_off in (state.learner.held_until, state.learner.rests.next_try_at, state.balanced_at + SCAN_PAUSE_S):
        if put_off > now:
            yield put_off
