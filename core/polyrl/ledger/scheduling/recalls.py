"""How a sample leaves a healthy engine for another one: it is recalled, and comes with all its tokens.

The other engine sets room aside, the present one stops the sample and sends what it has made, and the other goes on
with it: none of its tokens is generated twice. An engine that does not hear goes on with the sample, and greets anew
since nobody confirms its tokens; then it is asked again, and no room is held for what it was asked before. One that
falls silent loses the sample by its lease, with the tokens that it had not sent.

From a draining engine only what cannot be finished there is recalled:

    remaining = expected_tokens * step(engine, running)

A sample whose `remaining` fits into the time that is left stays. The others leave as soon as another engine has room,
the one with the most remaining first (longest processing time first, Graham 1969: the end of all is sooner), but none
before there is room: here it goes on generating, in a queue it would not. An agent gives back what is left before the
deadline (`reserve_of`); what has not come by then is moved by `leases`, room or not.
"""

from __future__ import annotations

from math import isfinite
from typing import Final

from polyrl.ledger import speed
from polyrl.ledger.events import MoveCause, RecallSent
from polyrl.ledger.scheduling import placement
from polyrl.ledger.scheduling.moves import move
from polyrl.ledger.scheduling.placement import PlacementRequest, may_generate
from polyrl.ledger.state import LeasedEngine, SamplePhase
from polyrl.ledger.transition import Transition
from polyrl.wire import Recall

RESERVE_S: Final = 2.0
"""The end of a drain in which the agent no longer generates: last tokens and goodbye travel."""

RESERVE_SHARE: Final = 0.25
"""The same for a short notice, as a share of it."""


def recall(transition: Transition, number: int, cause: MoveCause, to: LeasedEngine, request: PlacementRequest) -> None:
    """Asks an assignment's engine for it; `request` is its sample's, and `to` has room for it."""
    transition.record(RecallSent(number, cause, to=to.name, kv=request.size))
    transition.send(transition.state.assignments[number].engine, Recall(number))


def complete_recall(transition: Transition, number: int) -> None:
    """A recalled assignment has come. Where its room is gone, its sample waits like any other."""
    state = transition.state
    assignment = state.assignments[number]
    name, to = assignment.sample, state.engines.get(assignment.recall_target)
    otherwise = MoveCause.DRAINING if state.engines[assignment.engine].draining else MoveCause.REBALANCED
    move(transition, number, assignment.recall_cause or otherwise, cancel=False)
    sample = state.samples.get(name)
    if to is None or sample is None or sample.phase is not SamplePhase.WAITING:
        return
    request = placement.placement_request(state, name)
    able = placement.has_slot(to, transition.now) and placement.fits(to, request)
    if able and may_generate(state, to, request.low, request.high, transition.now):
        siblings = placement.sibling_engines(state, state.groups[request.group].group)
        placement.assign(transition, name, to, reading=request.unread(to, has_sibling=to.name in siblings))


def reserve_of(notice_s: float) -> float:
    """Seconds of a notice in which the agent no longer generates."""
    return min(RESERVE_S, RESERVE_SHARE * max(0.0, notice_s))


def leave_draining(transition: Transition) -> None:
    """Recalls what cannot be finished in time, as far as there is room elsewhere; what waits was placed before."""
    if transition.state.queue:
        return
    for engine in tuple(transition.state.engines.values()):
        if engine.draining and engine.running and isfinite(engine.drain_at):
            _leave(transition, engine)


def leaving_order(transition: Transition, engine: LeasedEngine) -> list[int]:
    """Assignments that it would not finish by its deadline, not recalled yet: by priority, the longest first."""
    state, left = transition.state, engine.drain_at - transition.now
    left -= reserve_of(left)
    step = speed.pace_of(engine, speed.fleet_step(state)).step(len(engine.running))
    long = []
    for number in engine.running:
        assignment = state.assignments[number]
        if assignment.recall_cause:
            continue
        sample = state.samples[assignment.sample]
        seconds = speed.expected_tokens(state, sample) * step
        if seconds > left:
            long.append((state.groups[sample.group].key[0], -seconds, number))
    return [number for _, _, number in sorted(long)]


def _leave(transition: Transition, engine: LeasedEngine) -> None:
    for number in leaving_order(transition, engine):
        request = placement.placement_request(transition.state, transition.state.assignments[number].sample)
        other = placement.engine_for(transition, request, without=engine.name)
        if other is not None:
            recall(transition, number, MoveCause.DRAINING, to=other, request=request)
