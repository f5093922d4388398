"""What each message of an agent leads to. Only an engine that greeted, and whose lease runs, is believed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from math import inf
from typing import Final

import msgspec

from polyrl import wire
from polyrl.ledger import events, speed
from polyrl.ledger.causes import GoneCause, MoveCause, RestPhase
from polyrl.ledger.messages.deltas import take_deltas
from polyrl.ledger.scheduling.leases import announce, drain_engine, lose_engine
from polyrl.ledger.scheduling.moves import half_open, move, quarantine, resume_pause, suspect_refusals
from polyrl.ledger.scheduling.recalls import complete_recall, reclaim
from polyrl.ledger.scheduling.rests import fell_asleep, order_again, order_under_way
from polyrl.ledger.state import LeasedEngine, LedgerState, assign_message, tokens_left
from polyrl.ledger.transition import Transition
from polyrl.sample import Pool
from polyrl.wire import HandBackReason

MAX_RUNNING: Final = 65_536
"""What an engine may take at once, as in the manifest."""

HELD_BESIDE: Final = 64
"""An agent holds what its engine runs, as many turns whose end is not confirmed, and a few more of the shortest."""

MAX_FOREIGN: Final = 4096
"""Assignments held that are over, each answered by a Cancel; who holds more is fenced, and so drops them at once."""

MAX_REWINDS: Final = 3
"""A sample's tokens are dropped so often for those that an engine says it holds; one that flaps may never send them."""

NO_VERSION: Final = -1
"""Version of an engine that serves nothing, or nothing that it has shown to have pulled."""

MAX_ASSIGNMENT: Final = 1 << 31
"""Half of what a row can name: a peer that claims to hold more must not use the numbers up."""


def handle_agent(transition: Transition, name: str, message: wire.FromAgent) -> None:
    """Decides one message of the engine that the route names."""
    if isinstance(message, wire.Hello):
        _greet(transition, name, message)
        return
    engine = transition.state.engines.get(name)
    if engine is not None and engine.silent:
        transition.record(events.EngineReturned(name, transition.now))
        half_open(transition, name)
        if engine.bereft:  # before anything confirms its tokens: it must still hold them when it greets
            transition.send(name, wire.Fenced("some of what it runs was moved meanwhile; greet", lease_over=True))
    if engine is None:
        transition.ignore("unknownEngine")
        transition.send(name, wire.Fenced("no lease runs for this engine; greet first", lease_over=True))
    elif isinstance(message, wire.Deltas):
        take_deltas(transition, engine, message)
    else:
        transition.record(events.EngineHeard(name, transition.now))
        _handle_rest(transition, engine, message)


def _handle_rest(transition: Transition, engine: LeasedEngine, message: wire.FromAgent) -> None:
    match message:
        case wire.Heartbeat(running, queued, kv_free, newest):
            # No more than can be: what an engine says of itself is part of every sample's cost.
            most, room = engine.capacity.max_running, engine.capacity.kv_tokens
            kv_free = min(kv_free, room) - (0 if newest < 0 else _on_their_way(transition.state, engine, newest))
            load = [max(0, min(number, top)) for number, top in ((running, most), (queued, most), (kv_free, room))]
            transition.record(events.EngineLoad(engine.name, load[0], queued=load[1], kv_free_tokens=load[2]))
        case wire.WeightsLoaded(version):
            if speed.is_news(engine, message.step_seconds, transition.now - max(0.0, message.tried_seconds_ago)):
                step_s, read_s, as_known = message.step_seconds, message.read_seconds, engine.step_scale
                transition.record(events.EngineTried(engine.name, transition.now, step_s=step_s, read_s=read_s))
                if not speed.is_about(engine.step_scale, as_known):
                    transition.follow_ups |= events.FollowUp.PLACE
            _serve(transition, engine, version, receipt=message.receipt)
        case wire.WeightsFailed(_, serving):
            _serve(transition, engine, serving, failed=True)
        case wire.Asleep():
            fell_asleep(transition, engine, message.order)
        case wire.HandBack():
            _handed_back(transition, engine, message)
        case wire.PrefixUnknown(number):
            _send_text(transition, engine, number)
        case wire.Leaving(deadline_s, reason):
            drain_engine(transition, engine.name, deadline_s=deadline_s, reason=reason)
        case wire.Deregister():
            lose_engine(transition, engine.name, GoneCause.DEREGISTERED)


def _on_their_way(state: LedgerState, engine: LeasedEngine, newest: int) -> int:
    """Tokens to be read of what was assigned after `newest`, and had not come when the engine counted its free room."""
    late = itertools.takewhile(lambda number: number > newest, reversed(engine.running))
    ones = (state.assignments[number] for number in late)
    return sum(one.kv - (one.kv_end - one.length) for one in ones)


def _counts(state: LedgerState, engine: LeasedEngine | None, version: int, receipt: bytes) -> bool:
    """Whether an engine's word for a version counts: it shows what only who pulled all of it has, or showed it before.

    One that is not known here counts later: a manager that was restarted may hear of it last, and announces it then."""
    if version < 0:
        return version == NO_VERSION  # one of many names for nothing would be news each time, and kept for good
    if engine is not None and version in engine.served:
        return True
    if not state.weights.receipt:
        return state.weights.version >= 0  # of a trainer that gives none
    return bool(receipt) and state.receipts.get(version) == receipt


def _send_text(transition: Transition, engine: LeasedEngine, number: int) -> None:
    """The whole text of an assignment, but not again for a lease: a few bytes are answered with up to megabytes."""
    assignment = transition.state.assignments.get(number)
    if assignment is None or assignment.engine != engine.name:
        return
    if transition.now < assignment.text_sent_at + transition.config.gone_s:
        transition.ignore("textAskedAgain")
        return
    transition.record(events.TextSent(number, transition.now))
    transition.send(engine.name, assign_message(transition.state, number, kept=0))


def _greet(transition: Transition, name: str, hello: wire.Hello) -> None:
    state, config, now = transition.state, transition.config, transition.now
    if hello.pool is not Pool.RESERVED:  # it shares no device with the trainer, whatever it says
        hello = msgspec.structs.replace(hello, sleeps=False, asleep=False)
    refusal = _refusal(transition, name, hello)
    if refusal is not None:
        transition.ignore("refusedHello")
        transition.send(name, wire.Fenced(refusal))
        return
    known = state.engines.get(name)
    ordered = order_under_way(known, hello)
    returns = name in state.vanished if known is None else known.silent
    if returns and known is not None:
        transition.record(events.EngineReturned(name, now))
    transition.record(_greeting(state, _within_bounds(transition, hello), now))
    if returns:
        half_open(transition, name)
    resume_pause(transition, name)
    engine = state.engines[name]
    taken = max((held.assignment + 1 for held in hello.held if held.assignment < MAX_ASSIGNMENT), default=0)
    if taken > state.next_assignment:
        transition.record(events.NumbersTaken(group=0, batch=0, assignment=taken, at=now))
    _reconcile_held(transition, engine, hello)
    # Only now: it sends what it holds as soon as it is welcome, and would send again what it is asked for afterwards.
    transition.send(name, wire.Welcome(config.run_epoch, config.lease_s, beat_s=config.beat_s, delta_s=config.delta_s))
    if ordered is not None:
        order_again(transition, engine, ordered)
    if hello.leaving_s is not None and now + hello.leaving_s < engine.drain_at:
        drain_engine(transition, name, deadline_s=hello.leaving_s, reason=hello.leaving_reason)
    elif engine.draining:
        transition.send(name, wire.StartDrain(max(0.0, engine.drain_at - now), engine.draining))
    elif state.finished:
        drain_engine(transition, name, deadline_s=0.0, reason="the run is over")
    elif engine.version != state.weights.version:
        announce(transition, name)


def _within_bounds(transition: Transition, hello: wire.Hello) -> wire.Hello:
    """What counts of its claims: no more than the manifest allows, and versions that it served here or has pulled."""
    state, config = transition.state, transition.config
    known = state.engines.get(hello.engine)

    named = {hello.weight_version, *hello.versions}
    counts = {one for one in named if _counts(state, known, one, hello.receipts.get(one, b""))}
    if counts != named:
        transition.ignore("unverifiedVersion")
    ordered = order_under_way(known, hello)
    serves, falls = hello.weight_version in counts, ordered is not None and ordered.phase is RestPhase.FALLING
    rests = falls or (hello.sleeps and hello.asleep)  # and serves nothing, whatever it says
    before = (hello.weight_version,) if serves and falls and hello.weight_version >= 0 else ()
    return msgspec.structs.replace(
        hello,
        max_running=min(hello.max_running, config.max_running),
        max_context=min(hello.max_context, config.max_context),
        weight_version=hello.weight_version if serves and not rests else NO_VERSION,
        versions=(*(version for version in hello.versions if version in counts), *before),
    )


def _refusal(transition: Transition, name: str, hello: wire.Hello) -> str | None:
    """Why a greeting is in vain."""
    state, epoch = transition.state, transition.config.run_epoch
    if hello.engine != name or hello.run_epoch != epoch:
        return f"this is epoch {epoch} and the connection of {name}"
    if min(hello.max_running, hello.kv_tokens, hello.max_context) < 1 or hello.max_running > MAX_RUNNING:
        return f"kv_tokens and max_context must be at least 1, max_running at most {MAX_RUNNING}"
    most = min(hello.max_running, transition.config.max_running)
    if len(hello.held) > 2 * most + HELD_BESIDE:
        return f"it holds {len(hello.held)} assignments, and its engine runs {most} at once"
    ours: Mapping[int, None] = state.engines[name].running if name in state.engines else {}
    if sum(not (held.assignment in ours or _has_left(state, name, held)) for held in hello.held) > MAX_FOREIGN:
        return f"more than {MAX_FOREIGN} of the assignments that it holds are over"
    return None


def _greeting(state: LedgerState, hello: wire.Hello, now: float) -> events.Event:
    """What a greeting brings: an engine that greets again and again makes the history no longer."""
    known = state.engines.get(hello.engine)
    capacity, version = hello.capacity, hello.weight_version
    as_before = known is not None and (known.pool, known.capacity, known.version) == (hello.pool, capacity, version)
    phase = RestPhase.ASLEEP if hello.sleeps and hello.asleep else RestPhase.AWAKE
    ordered = order_under_way(known, hello)
    phase = phase if ordered is None else ordered.phase
    as_before = as_before and known is not None and (known.rest.able, known.rest.phase) == (hello.sleeps, phase)
    if known is not None and as_before and set(hello.versions) <= set(known.served):
        return events.EngineGreetedAgain(hello.engine, now, seq=hello.seq)
    return events.EngineGreeted(
        hello.engine,
        hello.pool,
        capacity=capacity,
        version=version,
        at=now,
        versions=hello.versions,
        seq=hello.seq,
        sleeps=hello.sleeps,
        asleep=hello.asleep,
    )


def _reconcile_held(transition: Transition, engine: LeasedEngine, hello: wire.Hello) -> None:
    """Assignments that both sides know resume at our offset, and so do those that left it while it was silent and are
    nowhere further since; others are started again."""
    held = {h.assignment: h for h in hello.held}
    for number in tuple(engine.running):
        assignment, theirs = transition.state.assignments[number], held.pop(number, None)
        if theirs is None or theirs.length < assignment.length:
            # An agent that has fewer tokens than it once sent draws others after them; those would not fit. One
            # that has none may still get the Assign, which was on its way when it greeted.
            move(transition, number, MoveCause.NOT_HELD)
        else:
            transition.send(engine.name, wire.Resend(number, assignment.length))
    for number, theirs in held.items():
        if _may_reclaim(transition, engine, theirs):
            reclaim(transition, theirs.sample, engine.name)
        else:
            transition.send(engine.name, wire.Cancel(number))


def _has_left(state: LedgerState, engine: str, held: wire.HeldAssignment) -> bool:
    sample = state.samples.get(held.sample)
    return sample is not None and engine in sample.left and sample.left[engine][0] == held.assignment


def _may_reclaim(transition: Transition, engine: LeasedEngine, held: wire.HeldAssignment) -> bool:
    """Whether a sample left it while it was silent, and is nowhere further since than here."""
    state = transition.state
    if not _has_left(state, engine.name, held):
        return False
    sample = state.samples[held.sample]
    if held.length < sample.length or (sample.assignment and held.length == sample.length):
        return False
    has_slot = engine.occupied < engine.capacity.max_running
    fits = held.length <= sample.length + tokens_left(state, sample, engine.capacity.max_context)
    learns = engine.pool is Pool.RESERVED and not state.window_open
    return has_slot and fits and not learns and sample.rewinds < MAX_REWINDS


def _serve(
    transition: Transition, engine: LeasedEngine, version: int, *, receipt: bytes = b"", failed: bool = False
) -> None:
    """The engine serves `version`; samples that may not use it go elsewhere. What is newest is announced again to one
    that `failed` to load it, or is not believed."""
    believed = _counts(transition.state, engine, version, receipt)
    if not believed:
        transition.ignore("unverifiedVersion")
        version = NO_VERSION
    if engine.rest.phase is RestPhase.AWAKE and _wavers(transition, engine, version):
        believed, version = False, engine.version
    if engine.rest.phase is RestPhase.FALLING:
        version = NO_VERSION  # it was said before it slept
    elif engine.rest.phase in (RestPhase.ASLEEP, RestPhase.WAKING) and version >= 0:
        # One that is taken for asleep has followed an order to wake of a lease that is over; it may be sent to sleep.
        transition.record(events.EngineRests(engine.name, RestPhase.AWAKE, due=inf, at=transition.now))
    if version != engine.version:
        transition.record(events.EngineServing(engine.name, version, at=transition.now))
        _notify_if_first(transition, engine)
    retry_at = inf if version == transition.state.weights.version else engine.weights_at
    if failed or not believed:
        retry_at = transition.now + transition.config.weights_retry_s
    transition.record(events.WeightsAwaited(engine.name, retry_at))
    for number in tuple(engine.running):
        assignment = transition.state.assignments[number]
        if not assignment.low <= engine.version <= assignment.high:
            move(transition, number, MoveCause.VERSION_CHANGED)


def _notify_if_first(transition: Transition, engine: LeasedEngine) -> None:
    state, version = transition.state, engine.version
    served = any(other.version == version for name, other in state.engines.items() if name != engine.name)
    if version == state.weights.version and not served:
        transition.answer(wire.VersionServed(version))


def _wavers(transition: Transition, engine: LeasedEngine, version: int) -> bool:
    """Whether it no longer serves what it has served since it greeted, or serves that again, while it pauses. It pauses
    each time, and meanwhile its word changes nothing: wavering makes the history no longer."""
    drops = version < 0 <= engine.version
    returns = engine.version < 0 <= version and version in engine.served and engine.assigned_at > engine.greeted_at
    if not (drops or returns):
        return False
    if engine.quarantined_until > transition.now:
        return True
    quarantine(transition, engine.name, MoveCause.VERSION_CHANGED)
    return False


def _handed_back(transition: Transition, engine: LeasedEngine, given: wire.HandBack) -> None:
    assignment = transition.state.assignments.get(given.assignment)
    if assignment is None or assignment.engine != engine.name:
        transition.ignore("returnedTooLate")
        return
    if given.reason == HandBackReason.RECALLED:
        complete_recall(transition, given.assignment)
        return
    known = given.reason in HandBackReason.__members__.values()
    cause = MoveCause(given.reason) if known else MoveCause.ENGINE_ERROR
    if cause is MoveCause.VERSION_CHANGED:
        if assignment.low <= engine.version <= assignment.high:
            # It is about to load another version: WeightsLoaded or WeightsFailed will say which.
            transition.record(events.EngineServing(engine.name, -1, at=transition.now))
    elif cause is not MoveCause.REJECTED and not engine.draining:
        # Whatever it was, handing the same sample straight back would only repeat it.
        quarantine(transition, engine.name, cause)
    move(transition, given.assignment, cause, cancel=False, detail=given.detail)
    if cause is MoveCause.REJECTED:
        suspect_refusals(transition, engine.name)
