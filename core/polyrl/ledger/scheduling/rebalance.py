"""When an engine with room takes running samples from one where they would finish later.

    stay = expected_tokens * step(victim, running)
    go   = expected_tokens * step(thief, running + 1) + read(thief, what it reads already + what is new) + 2 * delta_s

The sample that would finish last goes first, to the engine where one more token takes least: an idle one (the tail
spreads) or a busy faster one (the tail gathers), whichever ends it sooner. It moves only when `stay - go` exceeds both
GAIN_S and GAIN_SHARE of `stay`, since the numbers are estimates and a wrong move costs what a right one gains, and only
if what the thief runs already still ends before `stay`: else the move would put the step's end off. Hysteresis: a
sample that moved stays put for REST_S, and one that tries an engine (see `placement`) stays until it is measured. An
engine that greets anew is asked for what it holds: before that has come, nothing of it is generated elsewhere.

One event looks at the slowest engines' samples, for the fastest engines with room, and after a look at many the next
one waits SCAN_PAUSE_S: what all of it costs does not grow with the fleet.
"""

from __future__ import annotations

from heapq import nlargest
from typing import Final, NamedTuple

from polyrl.ledger import speed
from polyrl.ledger.events import BalancePaused, MoveCause
from polyrl.ledger.scheduling import placement
from polyrl.ledger.scheduling.placement import PlacementRequest, has_slot
from polyrl.ledger.scheduling.recalls import recall
from polyrl.ledger.speed import Pace
from polyrl.ledger.state import Assignment, LeasedEngine, LedgerState
from polyrl.ledger.transition import Transition

GAIN_S: Final = 0.5
"""Seconds that a move must promise: above the noise of measured speeds over one window."""

GAIN_SHARE: Final = 0.25
"""Share of the remaining time that a move must promise."""

REST_S: Final = 5.0
"""A sample moves at most this often for speed's sake."""

THIEVES: Final = 8
"""Engines with room that are looked at per event, the fastest first."""

VICTIMS: Final = 8
"""Engines whose samples are looked at, the slowest first."""

SCANNED_AT_ONCE: Final = 200
"""Engines and samples beyond which the next look waits: some 1 ms, while a large fleet ends hundreds of samples a
second, and each end is an event."""

SCAN_PAUSE_S: Final = 0.25
"""How long it waits then: half of the least that a move must promise."""


class _Movable(NamedTuple):
    """A sample on an engine so slow that a move may pay; sorts by how long it will take there."""

    seconds: float
    """Until it is finished where it is."""
    number: int
    """Its assignment."""
    step: float
    """Seconds per token there."""
    engine: str


def rebalance(transition: Transition) -> None:
    """Lets engines with room take from those where samples would finish last."""
    state = transition.state
    paused = 0 <= transition.now - state.balanced_at < SCAN_PAUSE_S
    if state.queue or len(state.engines) < 2 or not state.assignments or paused:
        return
    fleet = speed.fleet_step(state)
    with_room = [(_step(e, fleet, 1), e.name) for e in state.engines.values() if has_slot(e, transition.now)]
    if not with_room:
        return
    movable = _movable(transition, fleet, min(with_room)[0] / (1 - GAIN_SHARE))
    requests: dict[int, PlacementRequest] = {}
    for step, name in sorted(with_room)[:THIEVES]:
        slower = [one for one in movable if one.step > step / (1 - GAIN_SHARE) and one.engine != name]
        _take(transition, state.engines[name], fleet, slower, requests)
    if len(state.engines) + len(movable) > SCANNED_AT_ONCE:
        transition.record(BalancePaused(transition.now, transition.now + SCAN_PAUSE_S))


def _step(engine: LeasedEngine, fleet: float, more: int = 0) -> float:
    """Seconds per token, with `more` samples on top of what it will run anyway."""
    return speed.pace_of(engine, fleet).step(engine.expected_running + more)


def _movable(transition: Transition, fleet: float, limit: float) -> list[_Movable]:
    """What may move from the slowest engines that take longer per token than `limit`: what would finish last, first."""
    state = transition.state
    # A draining engine gives back what leaves it, see `recalls`.
    running = [e for e in state.engines.values() if e.running and e.expected_running and not e.draining]
    steps = ((_step(engine, fleet), engine) for engine in running)
    slow = [(step, e.name) for step, e in steps if step > limit and not _is_unmeasured(state, e, transition.now)]
    found = [
        _Movable(_expected(state, number) * step, number, step=step, engine=name)
        for step, name in nlargest(VICTIMS, slow)
        for number in state.engines[name].running
        if not _rests(transition, number)
    ]
    return sorted(found, reverse=True)


def _is_unmeasured(state: LedgerState, engine: LeasedEngine, now: float) -> bool:
    """What it runs is to measure it, and has not yet; or it has just greeted, and what it holds is on its way."""
    if engine.on_trial and len(engine.running) == 1:
        return True
    if engine.token_at >= engine.greeted_at or now >= engine.greeted_at + REST_S:
        return False
    return state.assignments[next(iter(engine.running))].at < engine.greeted_at


def _rests(transition: Transition, number: int) -> bool:
    """It is on its way already, has moved, or has just begun."""
    one = transition.state.assignments[number]
    moved_at = transition.state.samples[one.sample].moved_at
    return bool(one.recall_cause) or moved_at + REST_S > transition.now or one.at + speed.WINDOW_S > transition.now


def _take(
    transition: Transition,
    thief: LeasedEngine,
    fleet: float,
    movable: list[_Movable],
    requests: dict[int, PlacementRequest],
) -> None:
    """What would finish last first, as far as it pays; `requests` keeps what samples need for the next thief."""
    state = transition.state
    last = max((_expected(state, other) for other in thief.running), default=0)
    for one in movable:
        if not has_slot(thief, transition.now):
            return
        assignment = state.assignments[one.number]
        if assignment.recall_cause:
            continue
        request = requests.get(one.number)
        if request is None:
            request = requests[one.number] = placement.placement_request(state, assignment.sample)
        if _worthwhile(transition, assignment, request, thief=thief, fleet=fleet, last=last):
            recall(transition, one.number, MoveCause.REBALANCED, to=thief, request=request)


def _expected(state: LedgerState, number: int) -> int:
    return speed.expected_tokens(state, state.samples[state.assignments[number].sample])


def _worthwhile(
    transition: Transition,
    assignment: Assignment,
    request: PlacementRequest,
    *,
    thief: LeasedEngine,
    fleet: float,
    last: int,
) -> bool:
    """`last`: tokens still to come of the longest sample that the thief runs."""
    state, victim = transition.state, transition.state.engines[assignment.engine]
    room = placement.fits(thief, request) and thief.kv_taken + request.size <= thief.capacity.kv_tokens
    if not room or not placement.may_generate(state, thief, assignment.low, assignment.high, transition.now):
        return False
    if last * _step(thief, fleet, 1) > request.expected * _step(victim, fleet):
        return False
    siblings = placement.sibling_engines(state, state.groups[request.group].group)
    reading = thief.unread + request.unread(thief, has_sibling=thief.name in siblings)
    there, here = ((speed.pace_of(engine, fleet), engine.expected_running) for engine in (victim, thief))
    return gain(request.expected, reading, victim=there, thief=here, delta_s=transition.config.delta_s)


def gain(tokens: int, reading: int, victim: tuple[Pace, int], thief: tuple[Pace, int], delta_s: float) -> bool:
    """Whether moving one sample pays; engines with their numbers of running samples before the move."""
    stay = tokens * victim[0].step(victim[1])
    go = tokens * thief[0].step(thief[1] + 1) + thief[0].read(reading) + 2 * delta_s
    return stay - go > max(GAIN_S, GAIN_SHARE * stay)
