"""Who leaves a draining engine when: what can be finished there stays, the rest goes on elsewhere without a pause.

    remaining = expected_tokens * step(engine, running)

A sample whose `remaining` fits into the time that is left stays. The others leave as soon as another engine has room,
the one with the most remaining first (longest processing time first, Graham 1969: the end of all is sooner), but none
before there is room: here it goes on generating, in a queue it would not. Who leaves is asked for, not taken (see
`returns`). An agent gives back what is left before the deadline (`reserve_of`); what has not come by then is moved by
`leases`, room or not.

Refuses to hold: deadlines. Read next: `leases`.
"""

from __future__ import annotations

from math import isfinite
from typing import Final

from polyrl.ledger import speed
from polyrl.ledger.scheduling.placement import engine_for, placement_request
from polyrl.ledger.scheduling.recalls import recall
from polyrl.ledger.state import LeasedEngine
from polyrl.ledger.transition import Transition

RESERVE_S: Final = 2.0
"""The end of a drain in which the agent no longer generates: last tokens and goodbye travel."""

RESERVE_SHARE: Final = 0.25
"""The same for a short notice, as a share of it."""


def reserve_of(notice_s: float) -> float:
    """Seconds of a notice in which the agent no longer generates."""
    return min(RESERVE_S, RESERVE_SHARE * max(0.0, notice_s))


def leave_draining(transition: Transition) -> None:
    """Asks for what cannot be finished in time, as far as there is room elsewhere; what waits was placed before."""
    if transition.state.queue:
        return
    for engine in tuple(transition.state.engines.values()):
        if engine.draining and engine.running and isfinite(engine.drain_at):
            _leave(transition, engine)


def leaving_order(transition: Transition, engine: LeasedEngine) -> list[int]:
    """Assignments that would not be finished by its deadline, and not asked for yet: by priority, then the longest."""
    left = engine.drain_at - transition.now
    left -= reserve_of(left)
    step = speed.pace_of(engine, speed.fleet_step(transition.state)).step(len(engine.running))
    long = []
    for number in engine.running:
        assignment = transition.state.assignments[number]
        if assignment.asked:
            continue
        sample = transition.state.samples[assignment.sample]
        seconds = speed.expected_tokens(transition.state, sample) * step
        if seconds > left:
            long.append((transition.state.groups[sample.group].key[0], -seconds, number))
    return [number for _, _, number in sorted(long)]


def _leave(transition: Transition, engine: LeasedEngine) -> None:
    for number in leaving_order(transition, engine):
        name = transition.state.assignments[number].sample
        need = placement_request(transition.state, name)
        other = engine_for(transition, name, need, without=engine.name)
        if other is not None:
            recall(transition, number, "draining", other, need)
