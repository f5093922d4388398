"""When a running sample moves: as soon as another engine with room finishes it sooner (see `cost`).

    stay = cost where it runs       infinite on an engine that drains and has not the time, long on one whose devices
                                    the trainer needs
    go   = cost on the other engine + 2 * delta_s

The sample that would finish last goes first, to where it costs least. It moves only when `stay - go` exceeds both
GAIN_S and GAIN_SHARE of `stay`, since the numbers are estimates and a wrong move costs what a right one gains, and only
if what the other engine runs already still ends before `stay`: else the move would put the step's end off. Hysteresis:
a sample that moved stays put for REST_S unless it gains MUCH_SHARE, and one that tries an engine stays until that is
measured, or reads far longer than at home. To an engine of the trainer's own it returns as soon as that is sooner by
HOME_SHARE: a step may lose no more against the reserved engines alone, and nothing leaves those for as little. An
engine that greets anew is asked for what it holds: before that has come, nothing of it is generated elsewhere.

An engine that has many prompts to read, since it was the first of all with a step's weights, gives up those that it has
not come to. Others take them one by one: what is on its way there has to be read as well.

An engine that gives no token for TOKENLESS_S is as slow as that says, measured or not: what it runs leaves if others
would be done sooner, and the engine has failed.

Room is what the queue leaves: engines that something waiting could use are not given what runs elsewhere.

A sample that tries an engine beside the trainer's own shows from SEEN_S on how slow that is, and goes back; what it
showed stands for the engine's speed until that is measured.

One event looks at the slowest engines' samples, for the fastest engines with room, and after a look at many the next
one waits SCAN_PAUSE_S: what all of it costs does not grow with the fleet.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import inf
from typing import Final, NamedTuple

from polyrl.ledger import speed
from polyrl.ledger.causes import MoveCause
from polyrl.ledger.events import BalancePaused
from polyrl.ledger.scheduling.cost import (
    Costs,
    PlacementRequest,
    fits,
    kv_room,
    may_generate,
    others_can,
    placement_request,
    sibling_engines,
)
from polyrl.ledger.scheduling.moves import quarantine
from polyrl.ledger.scheduling.placement import Room
from polyrl.ledger.scheduling.recalls import recall
from polyrl.ledger.scheduling.window import opens_in
from polyrl.ledger.state import LeasedEngine, LedgerState
from polyrl.ledger.transition import Transition
from polyrl.sample import Pool

GAIN_S: Final = 0.5
"""Seconds that a move must promise: above the noise of measured speeds over one window."""

GAIN_SHARE: Final = 0.25
"""Share of the remaining time that a move must promise."""

HOME_GAIN_S: Final = 0.1
"""The same of a sample that returns to a reserved engine."""

HOME_SHARE: Final = 0.03
"""The same: what a step may lose against the reserved engines alone."""

REST_S: Final = 5.0
"""A sample moves at most this often for speed's sake, unless that promises much."""

MUCH_SHARE: Final = 0.5
"""Share of the remaining time that lets it move again at once: it tried an engine that turned out slow."""

READS_AT_MOST: Final = 2
"""Times as long as the trainer's own engines a sample that tries an engine may read there, besides a window."""

TAKERS: Final = 8
"""Engines with room that are looked at per event, the fastest first."""

GIVERS: Final = 8
"""Engines whose samples are looked at, the slowest first; those that must give are looked at all."""

SCANNED_AT_ONCE: Final = 64
"""Samples beyond which the next look waits: some 0.5 ms, while a large fleet ends hundreds of samples a second, each
of them an event."""

SCAN_PAUSE_S: Final = 0.25
"""How long it waits then: half of the least that a move must promise. Only a window that closes and an engine that
begins to drain are not kept waiting: what must move there has no time."""

SCANNED: Final = 1024
"""Samples of all givers that one look reads: some 10 ms. The next look goes on where this one ended."""

MOVED_AT_ONCE: Final = 64
"""Samples that one look moves: some 20 ms. The next one moves more."""

TRIED_IN_VAIN: Final = 32
"""Samples in a row that gain by no move, from the last to end on: those that end sooner gain no more."""

LEAST_SCANNED: Final = 8
"""Samples of one giver that are read at least."""


class _Movable(NamedTuple):
    """A sample that a move may pay for; sorts by how long it will take where it is."""

    stay: float
    number: int
    """Its assignment."""
    engine: str


def rebalance(transition: Transition, room: Room) -> None:
    """Lets engines with room take from those where samples would finish last."""
    state, fleet, now = transition.state, transition.fleet, transition.now
    if len(state.engines) < 2 or not state.assignments or not fleet.roomy_engines:
        return
    if 0 <= now - state.balanced_at < SCAN_PAUSE_S and not transition.effects.forces_moves:
        return
    costs = Costs(transition)
    special = {e.name: e for e in (*fleet.reserved(), *fleet.leaving()) if e.running and not e.silent}
    forced = [engine for engine in special.values() if _must_give(state, engine, now)]
    tokenless = [e for e in fleet.tokenless(now) if not (e.draining or e.silent)]
    givers = list({e.name: e for e in (*forced, *tokenless, *_slow(transition, costs, room))}.values())
    movable, ends = _movable(transition, costs, givers), dict[str, float]()
    moved = in_vain = 0
    for one in movable:
        takers = list(itertools.islice(_takers(transition, room), TAKERS))
        if not takers or moved >= MOVED_AT_ONCE or in_vain >= TRIED_IN_VAIN:
            break
        gains_there = _move(transition, costs, one, takers, ends)
        moved, in_vain = moved + gains_there, 0 if gains_there or one.stay == inf else in_vain + 1
    if len(movable) > SCANNED_AT_ONCE:
        transition.record(BalancePaused(now, now + SCAN_PAUSE_S))


def _takers(transition: Transition, room: Room, *, only_own: bool = False) -> Iterator[LeasedEngine]:
    """Engines with room that nothing waiting could use, the fastest first. One that failed again, or never gave a
    token, proves itself with what waits, not with what runs well elsewhere. `only_own`: of the trainer's."""
    version = transition.state.weights.version
    own = transition.state.window_open or not others_can(transition, version, version)
    roomy = transition.fleet.roomy_own() if only_own else transition.fleet.roomy(with_own=own)
    able = (e for e in roomy if (own or not only_own) and room.has_slot(e) and not room.opens_in(e))
    able = (e for e in able if not e.failures or (e.step_scale and e.failures == 1))
    return (engine for engine in able if room.is_unclaimed(engine))


def _must_give(state: LedgerState, engine: LeasedEngine, now: float) -> bool:
    """It is about to go, or its devices are needed."""
    return engine.drain_at < inf if engine.draining else opens_in(state, engine, now) > 0


def _slow(transition: Transition, costs: Costs, room: Room) -> list[LeasedEngine]:
    """The slowest engines, as far as the fastest taker is faster by what a move must promise; before them those that
    have much to read, however fast they are then."""
    state, now = transition.state, transition.now
    takers = itertools.islice(_takers(transition, room), TAKERS)
    limit = min((costs.step(taker, 1) for taker in takers), default=inf) / (1 - GAIN_SHARE)
    if limit == inf:
        return []
    own = next(_takers(transition, room, only_own=True), None)
    home = inf if own is None else costs.step(own, 1) / (1 - HOME_SHARE)
    busy = itertools.takewhile(lambda engine: costs.step(engine) > min(limit, home), transition.fleet.busy())
    slow = (e for e in busy if costs.step(e) > limit or e.pool is not Pool.RESERVED)
    reading = (engine for engine in transition.fleet.reading() if costs.pace(engine).read(engine.unread) > GAIN_S)
    tried = itertools.islice(transition.fleet.tried(), GIVERS)
    givers = itertools.chain(tried, itertools.islice(reading, GIVERS), slow)
    able = (e for e in givers if e.expected_running and not (e.draining or e.silent or _must_give(state, e, now)))
    return list(itertools.islice((e for e in able if not _is_unmeasured(transition, costs, e)), GIVERS))


def _movable(transition: Transition, costs: Costs, givers: list[LeasedEngine]) -> list[_Movable]:
    """What may move from these engines: what must, by priority, then what would finish last."""
    state, now = transition.state, transition.now
    share = max(LEAST_SCANNED, SCANNED // max(1, len(givers)))
    found = []
    for engine in givers:
        forced, unread = _must_give(state, engine, now), _unread(state, engine)
        for number in transition.fleet.some_running(engine, share):
            if _rests(transition, number, forced=forced):
                continue
            expected = speed.expected_tokens(state, state.samples[state.assignments[number].sample])
            seen = _seen_step(transition, costs, engine, number)
            if seen == 0.0:
                continue
            stay = costs.staying(engine, expected, unread.get(number, 0)) if seen is None else expected * seen
            one = _Movable(stay, number, engine=engine.name)
            found.append((-stay, _priority(state, number) if stay == inf else 0, -expected, one))
    found.sort(key=lambda place: place[:-1])
    return [one for *_, one in found]


def _seen_step(transition: Transition, costs: Costs, engine: LeasedEngine, number: int) -> float | None:
    """Seconds per token of what tries an engine, as far as they show before its speed is measured, 0 while they do not;
    None if nothing tries it."""
    state, assignment = transition.state, transition.state.assignments[number]
    if engine.step_scale or engine.draining or engine.pool is Pool.RESERVED or not transition.fleet.reserved():
        return None
    sample = state.samples[assignment.sample]
    made = assignment.length - sample.spans[-1].start if assignment.begun else 0
    unread = len(state.groups[sample.group].group.prompt_ids) // 4 + assignment.length - made
    prefill_s = engine.prefill_s or _prefill_at_home(transition, costs, engine)
    # Of short prompts nobody counts what is read; those that came with it are about as long.
    among = engine.read_tokens + engine.unread if engine.reading else unread * engine.starting
    read_s = prefill_s * max(unread, among)
    seconds = transition.now - assignment.at - (1 if made else 2) * read_s
    return seconds / (made + 1) if seconds >= speed.SEEN_S else 0.0


def _prefill_at_home(transition: Transition, costs: Costs, engine: LeasedEngine) -> float:
    """Seconds to read a token, as the trainer's own engines do: by what one needs for a step nobody knows that."""
    known = [one.prefill_s for one in transition.fleet.reserved() if one.prefill_s]
    return sum(known) / len(known) if known else costs.pace(engine).prefill_s


def _unread(state: LedgerState, engine: LeasedEngine) -> dict[int, int]:
    """By assignment that waits for its first token: tokens that the engine reads before it, in their order."""
    if not engine.reading:
        return {}
    numbers = [number for number in sorted(engine.running) if state.assignments[number].reading]
    tokens = itertools.accumulate(state.assignments[number].reading for number in numbers)
    return dict(zip(numbers, tokens, strict=True))


def _request(state: LedgerState, number: int, now: float) -> PlacementRequest:
    return placement_request(state, state.assignments[number].sample, now)


def _priority(state: LedgerState, number: int) -> int:
    return state.groups[state.samples[state.assignments[number].sample].group].key[0]


def _is_unmeasured(transition: Transition, costs: Costs, engine: LeasedEngine) -> bool:
    """What it runs is to measure it, and has not yet; or it has just greeted, and what it holds is on its way."""
    now, first = transition.now, transition.state.assignments[next(iter(engine.running))]
    if engine.on_trial and len(engine.running) == 1:
        # It may read what was taken from it before, for as long as its old measure was bad.
        may_read_s = READS_AT_MOST * first.reading * _prefill_at_home(transition, costs, engine)
        return not first.reading or now < first.at + may_read_s + speed.WINDOW_S
    if engine.token_at >= engine.greeted_at or now >= engine.greeted_at + REST_S:
        return False
    return first.at < engine.greeted_at


def _rests(transition: Transition, number: int, *, forced: bool) -> bool:
    """It is on its way already; or without need it has just begun."""
    one = transition.state.assignments[number]
    if one.recall_cause or forced:
        return bool(one.recall_cause)
    rests_s = speed.WINDOW_S if transition.state.engines[one.engine].step_scale else speed.SEEN_S
    return one.at + rests_s > transition.now


def _move(
    transition: Transition, costs: Costs, one: _Movable, takers: list[LeasedEngine], ends: dict[str, float]
) -> bool:
    """To where it costs least, if that pays; whether it does. `ends`: seconds until takers have ended what they run."""
    state, now = transition.state, transition.now
    request = _request(state, one.number, now)
    siblings = sibling_engines(state, state.groups[request.group].group)
    offers = [
        (costs.on(taker, request, has_sibling=taker.name in siblings), taker.name)
        for taker in takers
        if taker.name != one.engine
        and taker.name not in (request.avoid, *request.rejected_by)
        and fits(taker, request, now)
        and request.size <= kv_room(taker, now)
        and may_generate(transition, taker, request.low, request.high)
        and (one.stay == inf or _last_end(state, costs, taker, ends) <= one.stay)
        and (not state.assignments[one.number].reading or _reads_at_once(state.engines[one.engine], taker))
    ]
    offers = [(go, name) for go, name in offers if _pays(transition, one, go, state.engines[name])]
    if not offers:
        return False
    _, name = min(offers)
    ends.pop(name, None)
    _doubt(transition, one.number)
    recall(transition, one.number, _cause(state, one, now), to=state.engines[name], request=request)
    return True


def _pays(transition: Transition, one: _Movable, go: float, taker: LeasedEngine) -> bool:
    state, rests_until = transition.state, REST_S
    rests_until += state.samples[state.assignments[one.number].sample].moved_at
    home = taker.pool is Pool.RESERVED and state.engines[one.engine].pool is not Pool.RESERVED
    return gains(one.stay, go, transition.config.delta_s, home=home, rests=rests_until > transition.now)


def _reads_at_once(giver: LeasedEngine, taker: LeasedEngine) -> bool:
    """What is on its way there will be read first; and what an engine of another kind takes for a prompt is unknown
    until it has worked."""
    return not taker.reserved_kv and (taker.step_scale > 0 or taker.pool is giver.pool)


def _doubt(transition: Transition, number: int) -> None:
    """An engine that gave no token for as long, and must be left for it, has failed: else two of them would hand a
    sample to and fro for ever, each taken for sound since nothing was ever measured of it."""
    state = transition.state
    engine = state.engines[state.assignments[number].engine]
    if not engine.draining and speed.tokenless_s(engine) >= speed.TOKENLESS_S and not engine.unproven:
        quarantine(transition, engine.name, MoveCause.STALLED)


def _last_end(state: LedgerState, costs: Costs, engine: LeasedEngine, ends: dict[str, float]) -> float:
    """Seconds until it has ended all that it runs, with one sample more."""
    if engine.name not in ends:
        samples = (state.samples[state.assignments[number].sample] for number in engine.running)
        longest = max((speed.expected_tokens(state, sample) for sample in samples), default=0)
        ends[engine.name] = longest * costs.step(engine, 1)
    return ends[engine.name]


def _cause(state: LedgerState, one: _Movable, now: float) -> MoveCause:
    engine = state.engines[one.engine]
    if engine.draining:
        return MoveCause.DRAINING
    return MoveCause.WINDOW if opens_in(state, engine, now) else MoveCause.REBALANCED


def gains(stay: float, go: float, delta_s: float, *, home: bool = False, rests: bool = False) -> bool:
    """Whether moving pays: seconds until the sample is done here, and there once it has arrived."""
    go += 2 * delta_s
    if stay == inf:
        return go < stay
    if home:
        return stay - go > max(HOME_GAIN_S, HOME_SHARE * stay)
    return stay - go > max(GAIN_S, (MUCH_SHARE if rests else GAIN_SHARE) * stay)
