"""When an engine with room takes running samples from one where they would finish later.

    stay = expected_tokens * step(victim, running)
    go   = expected_tokens * step(thief, running + 1) + read(thief, what it reads already + what is new) + 2 * delta_s

The sample that would finish last goes first, to the engine where one more token takes least: an idle one (the tail
spreads) or a busy faster one (the tail gathers), whichever ends it sooner. It moves only when `stay - go` exceeds both
GAIN_S and GAIN_SHARE of `stay`, since the numbers are estimates and a wrong move costs what a right one gains, and only
if what the thief runs already still ends before `stay`: else the move would put the step's end off. Hysteresis: a
sample that moved stays put for REST_S, and one that tries an engine (see `placement`) stays until it has told. An
engine that greets anew is asked for what it holds: before that has come, nothing of it is generated elsewhere.

Refuses to hold: waiting samples (`placement` takes those first). Read next: `drains`.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nlargest
from typing import Final

from polyrl.ledger import speed
from polyrl.ledger.decision import Decision
from polyrl.ledger.placement import fits, has_slot, homes_of, need_of
from polyrl.ledger.reserved import may_generate
from polyrl.ledger.returns import ask_back
from polyrl.ledger.speed import Pace
from polyrl.ledger.state import Engine, State

GAIN_S: Final = 0.5
"""Seconds that a move must promise: above the noise of measured speeds over one window."""

GAIN_SHARE: Final = 0.25
"""Share of the remaining time that a move must promise."""

REST_S: Final = 5.0
"""A sample moves at most this often for speed's sake."""

THIEVES: Final = 8
"""Engines with room that are looked at per event, the fastest first: what one event can cost must not grow with the
fleet, and the next event goes on."""

VICTIMS: Final = 8
"""Engines that are looked at for each of them, the slowest first."""


def rebalance(d: Decision) -> None:
    """Lets engines with room take from those where samples would finish last."""
    if d.state.queue or len(d.state.engines) < 2 or not d.state.assignments:
        return
    fleet = speed.fleet_step(d.state)
    with_room = [(_next_step(e, fleet), e.name) for e in d.state.engines.values() if has_slot(e, d.now)]
    if not with_room:
        return
    slowest = max(_present_step(engine, fleet) for engine in d.state.engines.values())
    for step, name in sorted(with_room)[:THIEVES]:
        if slowest * (1 - GAIN_SHARE) <= step:
            return
        _take(d, d.state.engines[name], fleet)


def _next_step(engine: Engine, fleet: float) -> float:
    """Seconds per token with one sample more."""
    return speed.pace_of(engine, fleet).step(engine.soon + 1)


def _present_step(engine: Engine, fleet: float) -> float:
    """Seconds per token; 0 when it runs nothing."""
    return speed.pace_of(engine, fleet).step(engine.soon) if engine.soon else 0.0


def _is_to_speak(state: State, engine: Engine, now: float) -> bool:
    """What it runs is to measure it, and has not yet; or it has just greeted, and what it holds is on its way."""
    if engine.on_trial and len(engine.running) == 1:
        return True
    if engine.token_at >= engine.greeted_at or now >= engine.greeted_at + REST_S:
        return False
    return state.assignments[next(iter(engine.running))].at < engine.greeted_at


def _take(d: Decision, thief: Engine, fleet: float) -> None:
    """What would finish last first, as far as it pays."""
    for _, number in sorted(_candidates(d.state, thief, fleet, d.now), reverse=True):
        if not has_slot(thief, d.now):
            return
        if _worthwhile(d, number, thief, fleet):
            need = need_of(d.state, d.state.assignments[number].sample)
            ask_back(d, number, "rebalanced", thief, need)


def _candidates(state: State, thief: Engine, fleet: float, now: float) -> Iterator[tuple[float, int]]:
    """(seconds until it is finished where it is, assignment) on engines so slow that a move may pay."""
    limit = _next_step(thief, fleet) / (1 - GAIN_SHARE)
    others = (e for e in state.engines.values() if e is not thief and _may_lose(e) and not _is_to_speak(state, e, now))
    slow = ((_present_step(e, fleet), e.name) for e in others)
    for step, name in nlargest(VICTIMS, slow):
        if step > limit:
            for number in state.engines[name].running:
                yield _expected(state, number) * step, number


def _may_lose(engine: Engine) -> bool:
    """A draining engine gives back what leaves it, see `drains`."""
    return bool(engine.running) and not engine.draining


def _expected(state: State, number: int) -> int:
    return speed.expected_tokens(state, state.samples[state.assignments[number].sample])


def _to_read(state: State, name: str, thief: Engine) -> int:
    group = state.groups[state.samples[name].group].group
    return need_of(state, name).unread(thief, thief.name in homes_of(state, group))


def _worthwhile(d: Decision, number: int, thief: Engine, fleet: float) -> bool:
    state, assignment = d.state, d.state.assignments[number]
    if (
        assignment.asked
        or state.samples[assignment.sample].moved_at + REST_S > d.now
        or assignment.at + speed.WINDOW_S > d.now
    ):
        return False
    need, victim = need_of(state, assignment.sample), state.engines[assignment.engine]
    room = fits(thief, need) and thief.kv_taken + need.size <= thief.kv_tokens
    if not room or not may_generate(state, thief, assignment.low, assignment.high, d.now):
        return False
    there, here = speed.pace_of(victim, fleet), speed.pace_of(thief, fleet)
    reading = thief.unread + _to_read(state, assignment.sample, thief)
    running = (victim.soon, thief.soon)
    if not gain(need.expected, reading, (there, running[0]), (here, running[1]), d.config.delta_s):
        return False
    last = max((_expected(state, other) for other in thief.running), default=0)
    return last * here.step(running[1] + 1) <= need.expected * there.step(running[0])


def gain(tokens: int, reading: int, victim: tuple[Pace, int], thief: tuple[Pace, int], delta_s: float) -> bool:
    """Whether moving one sample pays; engines with their numbers of running samples before the move."""
    stay = tokens * victim[0].step(victim[1])
    go = tokens * thief[0].step(thief[1] + 1) + thief[0].read(reading) + 2 * delta_s
    return stay - go > max(GAIN_S, GAIN_SHARE * stay)
