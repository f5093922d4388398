"""How a sample leaves a healthy engine for another one: it is recalled, and comes with all its tokens.

The other engine sets room aside, the present one stops the sample and sends what it has made, and the other goes on
with it: none of its tokens is generated twice. An engine that does not hear goes on with the sample, and greets anew
since nobody confirms its tokens; then it is asked again, and no room is held for what it was asked before. One that
falls silent loses the sample; when it is back, and has got further than who went on with it, the sample is taken back.

From a draining engine what cannot be finished there leaves as soon as another engine has room (longest processing time
first, Graham 1969: the end of all is sooner), but not before: here it goes on generating, in a queue it would not. An
agent gives back what is left before the deadline (`notice`); what has not come by then is moved by `leases`, room or
not.
"""

from __future__ import annotations

from polyrl.ledger import speed
from polyrl.ledger.causes import MoveCause, RestPhase
from polyrl.ledger.events import RecallSent, Reclaimed
from polyrl.ledger.scheduling.cost import (
    PlacementRequest,
    fits,
    has_slot,
    may_generate,
    placement_request,
    sibling_engines,
)
from polyrl.ledger.scheduling.moves import move
from polyrl.ledger.scheduling.placement import assign
from polyrl.ledger.state import LeasedEngine, SamplePhase
from polyrl.ledger.transition import Transition
from polyrl.wire import Cancel, Recall, Resend


def recall(transition: Transition, number: int, cause: MoveCause, to: LeasedEngine, request: PlacementRequest) -> None:
    """Asks an assignment's engine for it; `request` is its sample's, and `to` has room for it."""
    transition.record(RecallSent(number, cause, to=to.name, kv=request.size))
    transition.send(transition.state.assignments[number].engine, Recall(number))


def complete_recall(transition: Transition, number: int) -> None:
    """A recalled assignment has come. Where its room is gone, its sample waits like any other."""
    state = transition.state
    assignment = state.assignments[number]
    name, to = assignment.sample, state.engines.get(assignment.recall_target)
    engine = state.engines[assignment.engine]
    otherwise = MoveCause.DRAINING if engine.draining else MoveCause.REBALANCED
    otherwise = otherwise if engine.rest.phase is RestPhase.AWAKE else MoveCause.WINDOW
    move(transition, number, assignment.recall_cause or otherwise, cancel=False)
    sample = state.samples.get(name)
    if to is None or sample is None or sample.phase is not SamplePhase.WAITING:
        return
    request = placement_request(state, name, transition.now)
    able = has_slot(to, transition.now) and fits(to, request, transition.now)
    if able and may_generate(transition, to, request.low, request.high):
        siblings = sibling_engines(state, state.groups[request.group].group)
        assign(transition, name, to, reading=request.unread(to, has_sibling=to.name in siblings))


def reclaim(transition: Transition, name: str, engine: str) -> None:
    """A sample goes on at an engine that it left while that was silent; what others made since is dropped."""
    state = transition.state
    sample = state.samples[name]
    if sample.assignment:
        transition.send(state.assignments[sample.assignment].engine, Cancel(sample.assignment))
    number, length = sample.left[engine]
    kv = len(state.groups[sample.group].group.prompt_ids) // 4 + length + speed.expected_tokens(state, sample)
    transition.record(Reclaimed(number, name, engine=engine, length=length, kv=kv, at=transition.now))
    transition.send(engine, Resend(number, length))
