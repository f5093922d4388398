"""How the state changes with what happens to engines, to time and to the run: one function per event."""

from __future__ import annotations

from math import inf
from typing import Final

from polyrl.ledger import events, speed
from polyrl.ledger.apply.samples import end_recall, increment, wake
from polyrl.ledger.apply.work import count_work
from polyrl.ledger.causes import GoneCause, RestPhase
from polyrl.ledger.measures.departures import MEMORY, Departed
from polyrl.ledger.measures.losses import Losses
from polyrl.ledger.measures.rests import Rest
from polyrl.ledger.state import LeasedEngine, LedgerState, step_key
from polyrl.sample import Pool, Purpose

ANSWERED_MEMORY: Final = 1024
"""Requests remembered by digest: far more than a trainer can have unanswered."""

CONTENTS_MEMORY: Final = 256
"""Versions of which the content is remembered: more than lie between two checkpoints."""

REPLACED_MEMORY: Final = 64
"""Replaced trainers remembered: each restart of a trainer makes one."""

VANISHED_MEMORY: Final = 8192
"""Engines remembered that went silent: two fleets of the largest kind. One that is forgotten counts as one that went
silent for the first time."""

FLAP_MEMORY_S: Final = 600.0
"""An engine that stays for this long begins anew: ten of its longest pauses."""

SERVED_MEMORY: Final = 128
"""Verified versions remembered per engine: twice the largest allowed staleness."""


def apply_version_published(state: LedgerState, event: events.VersionPublished) -> None:
    state.weights, state.published_at = event.weights, event.at
    state.contents[event.weights.version] = event.weights.content
    state.receipts[event.weights.version] = event.weights.receipt
    for memory in (state.contents, state.receipts):
        if len(memory) > CONTENTS_MEMORY:
            del memory[next(iter(memory))]


def apply_window_set(state: LedgerState, event: events.WindowSet) -> None:
    reserved = [engine for engine in state.engines.values() if engine.pool is Pool.RESERVED]
    before = sum(_is_present(state, engine) for engine in reserved)
    for engine in reserved:
        count_work(state, engine, event.at)
    state.window_open, state.window_at = event.open, event.at
    state.usage.change_present(sum(_is_present(state, engine) for engine in reserved) - before, event.at)
    state.stall_due = min(state.stall_due, event.at + state.config.progress_deadline_s)
    for engine in reserved:
        speed.pause_window(engine, event.at)  # what it does while the trainer learns says nothing of its speed


def apply_batch_held(state: LedgerState, event: events.BatchHeld) -> None:
    state.learner.held_until = event.until
    wake(state, event.until)


def apply_reported(state: LedgerState, event: events.Reported) -> None:
    state.phase, state.step, state.values = event.phase, event.step, event.values
    state.usage.finish(step_key(event.step, Purpose.TRAIN), event.values)


def apply_request_done(state: LedgerState, event: events.RequestDone) -> None:
    state.answered[event.request] = event.digest
    if len(state.answered) > ANSWERED_MEMORY:
        del state.answered[next(iter(state.answered))]


def apply_trainer_heard(state: LedgerState, event: events.TrainerHeard) -> None:
    state.trainer_at = event.at


def apply_trainer_greeted(state: LedgerState, event: events.TrainerGreeted) -> None:
    if state.trainer and event.trainer != state.trainer:
        state.replaced.append(state.trainer)
        del state.replaced[:-REPLACED_MEMORY]
    if event.trainer != state.trainer:
        state.learner.busy_since, state.learner.alone = inf, False
        state.usage.done = -1
        for sample in state.samples.values():
            sample.trainer_has = 0
    state.trainer, state.trainer_since, state.covers = event.trainer, event.at, event.covers


def apply_run_finished(state: LedgerState, event: events.RunFinished) -> None:
    state.finished, state.ok, state.message = True, event.ok, event.message


def apply_engine_greeted(state: LedgerState, event: events.EngineGreeted) -> None:
    engine = state.engines.get(event.engine)
    before = engine is not None and _is_present(state, engine)
    was_seen = engine is not None and _may_be_lost(engine)
    if engine is None:
        engine = state.engines[event.engine] = LeasedEngine(event.engine, event.pool, capacity=event.capacity)
    engine.pool, engine.capacity = event.pool, event.capacity
    _begin_anew(state, engine, event.at, event.seq)
    phase = RestPhase.ASLEEP if event.asleep else RestPhase.AWAKE
    engine.rest = Rest(event.sleeps, phase if event.sleeps else RestPhase.AWAKE, since=event.at)
    for version in event.versions[-SERVED_MEMORY:]:
        _verify(engine, version)
    _serve(engine, event.version)
    state.usage.change_present(_is_present(state, engine) - before, event.at)
    if _may_be_lost(engine) and not was_seen:
        _losses(state, engine).change(1, event.at)


def _may_be_lost(engine: LeasedEngine) -> bool:
    """It may vanish without a word, and has not."""
    return engine.pool is not Pool.RESERVED and not (engine.silent or engine.draining)


def _losses(state: LedgerState, engine: LeasedEngine) -> Losses:
    return state.usage.losses.setdefault(engine.pool, Losses())


def _is_present(state: LedgerState, engine: LeasedEngine) -> bool:
    """Whether it could generate, if there were work; a silent one, until its lease ends."""
    return engine.version >= 0 and not engine.draining and (state.window_open or engine.pool is not Pool.RESERVED)


def apply_engine_greeted_again(state: LedgerState, event: events.EngineGreetedAgain) -> None:
    _begin_anew(state, state.engines[event.engine], event.at, event.seq)


def _begin_anew(state: LedgerState, engine: LeasedEngine, at: float, seq: int) -> None:
    engine.heard_at = engine.greeted_at = at
    engine.seq, engine.bereft = seq, False
    for number in engine.running:
        end_recall(state, number)  # it may never have heard
    # What it has gathered while nobody listened, or while our clock stood still, says nothing of its speed.
    speed.pause_window(engine, at)
    wake(state, at + state.config.lease_s)


def _serve(engine: LeasedEngine, version: int) -> None:
    engine.version = version
    _verify(engine, version)


def _verify(engine: LeasedEngine, version: int) -> None:
    if version < 0:
        return
    if version in engine.served:
        engine.served.remove(version)
    engine.served.append(version)
    del engine.served[:-SERVED_MEMORY]


def apply_engine_heard(state: LedgerState, event: events.EngineHeard) -> None:
    state.engines[event.engine].heard_at = event.at


def apply_engine_silent(state: LedgerState, event: events.EngineSilent) -> None:
    engine = state.engines[event.engine]
    if _may_be_lost(engine):
        _losses(state, engine).lose(state.config.lease_s, event.at)
    engine.silent = True
    for number in engine.running:
        end_recall(state, number)  # nobody answers; other engines' room is not held for it
    times, at = state.vanished.pop(event.engine, (0, -inf))
    state.vanished[event.engine] = (times + 1 if event.at - at < FLAP_MEMORY_S else 1, event.at)
    if len(state.vanished) > VANISHED_MEMORY:
        del state.vanished[next(iter(state.vanished))]


def apply_engine_returned(state: LedgerState, event: events.EngineReturned) -> None:
    engine = state.engines[event.engine]
    _come_back(state, engine, event.at)
    engine.heard_at = event.at
    speed.pause_window(engine, event.at)
    wake(state, event.at + state.config.lease_s)


def _come_back(state: LedgerState, engine: LeasedEngine, at: float) -> None:
    was_silent, engine.silent = engine.silent, False
    if was_silent and _may_be_lost(engine):
        _losses(state, engine).regain(at)


def apply_engine_load(state: LedgerState, event: events.EngineLoad) -> None:
    engine = state.engines[event.engine]
    engine.load = (event.running, event.queued, event.kv_free_tokens)
    engine.load_at, engine.kv_since = engine.heard_at, 0


def apply_engine_serving(state: LedgerState, event: events.EngineServing) -> None:
    engine = state.engines[event.engine]
    before = _is_present(state, engine)
    _serve(engine, event.version)
    state.usage.change_present(_is_present(state, engine) - before, event.at)


def apply_engine_tried(state: LedgerState, event: events.EngineTried) -> None:
    speed.take_trial(state.engines[event.engine], event.step_s, event.read_s, at=event.at)


def apply_engine_rests(state: LedgerState, event: events.EngineRests) -> None:
    engine, seconds = state.engines[event.engine], state.learner.rests
    before, taken = _is_present(state, engine), event.at - engine.rest.since
    if (engine.rest.phase, event.phase) == (RestPhase.FALLING, RestPhase.ASLEEP):
        seconds.sleep_s = speed.smoothed(seconds.sleep_s, taken)
    elif (engine.rest.phase, event.phase) == (RestPhase.WAKING, RestPhase.AWAKE) and engine.served:  # no first start
        seconds.wake_s = speed.smoothed(seconds.wake_s, taken)
    seconds.orders += event.phase is RestPhase.FALLING
    order = seconds.orders if event.phase is RestPhase.FALLING else engine.rest.order
    engine.rest = Rest(engine.rest.able, event.phase, since=event.at, due=event.due, order=order)
    if event.phase is not RestPhase.AWAKE:
        engine.version = -1  # until it has weights again nothing is placed on it
    state.usage.change_present(_is_present(state, engine) - before, event.at)
    wake(state, event.due)


def apply_waking_put_off(state: LedgerState, event: events.WakingPutOff) -> None:
    state.learner.rests.next_try_at = event.until
    wake(state, event.until)


def apply_weights_awaited(state: LedgerState, event: events.WeightsAwaited) -> None:
    state.engines[event.engine].weights_at = event.retry_at
    wake(state, event.retry_at)


def apply_engine_quarantined(state: LedgerState, event: events.EngineQuarantined) -> None:
    engine = state.engines[event.engine]
    engine.failures += 1
    engine.quarantined_until = event.quarantined_until
    wake(state, event.quarantined_until)


def apply_engine_departed(state: LedgerState, event: events.EngineDeparted) -> None:
    departed = state.usage.departed
    before = departed.pop(event.engine, None)
    times = 1 if before is None else before.times + 1
    departed[event.engine] = Departed(times, event.until, text=f"step {event.step}: {event.text}")
    if len(departed) > MEMORY:
        del departed[next(iter(departed))]


def apply_engine_draining(state: LedgerState, event: events.EngineDraining) -> None:
    engine = state.engines[event.engine]
    before = _is_present(state, engine)
    if _may_be_lost(engine):
        _losses(state, engine).change(-1, event.at)
    engine.draining, engine.drain_at = engine.draining or event.reason, event.drain_at
    state.usage.change_present(_is_present(state, engine) - before, event.at)
    wake(state, event.drain_at)


def apply_drain_expired(state: LedgerState, event: events.DrainExpired) -> None:
    state.engines[event.engine].drain_at = -inf


def apply_engine_gone(state: LedgerState, event: events.EngineGone) -> None:
    engine = state.engines.pop(event.engine)
    if _may_be_lost(engine):
        _losses(state, engine).change(-1, event.at)
    state.usage.change_present(-_is_present(state, engine), event.at)
    if event.cause == GoneCause.DEREGISTERED:
        state.vanished.pop(event.engine, None)
        return
    state.counters.losses += 1


def apply_gap_seen(state: LedgerState, event: events.GapSeen) -> None:
    state.engines[state.assignments[event.assignment].engine].gaps[event.assignment] = event.at


def apply_text_sent(state: LedgerState, event: events.TextSent) -> None:
    state.assignments[event.assignment].text_sent_at = event.at


def apply_leases_renewed(state: LedgerState, event: events.LeasesRenewed) -> None:
    for engine in state.engines.values():
        # One that was silent before stays so until it is heard: it may run what has been moved away from it.
        engine.heard_at = max(engine.heard_at, event.at)
        engine.counts_from = event.at
        speed.pause_window(engine, event.at + speed.BACKLOG_S)
    for assignment in state.assignments.values():
        assignment.progress_at = max(assignment.progress_at, event.at)


def apply_ticked(state: LedgerState, event: events.Ticked) -> None:
    state.due, state.stall_due, state.ask_due = event.due, event.stall_due, event.ask_due


def apply_ignored(state: LedgerState, event: events.Ignored) -> None:
    increment(state.counters.ignored, event.kind)
