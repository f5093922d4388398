"""How a sample leaves a healthy engine for another one: it is asked for, and comes with all its tokens.

    recall     the other engine sets room aside, the present one stops the sample and sends what it has made of it
    complete_recall    it has come: its assignment ends, and the other engine goes on with it

So none of its tokens is generated twice. An engine that does not hear goes on with the sample, and greets anew since
nobody confirms its tokens; then it is asked again, and no room is held for what it was asked before. One that falls
silent loses the sample by its lease, with the tokens that it had not sent.

Refuses to hold: who leaves, and for where (see `drains`, `rebalance`). Read next: `moves`.
"""

from __future__ import annotations

from polyrl.ledger.events import RecallSent
from polyrl.ledger.scheduling.moves import move
from polyrl.ledger.scheduling.placement import (
    PlacementRequest,
    assign,
    fits,
    has_slot,
    placement_request,
    sibling_engines,
)
from polyrl.ledger.scheduling.reserved import may_generate
from polyrl.ledger.state import LeasedEngine, SamplePhase
from polyrl.ledger.transition import Transition
from polyrl.wire import Recall


def recall(transition: Transition, number: int, cause: str, to: LeasedEngine, need: PlacementRequest) -> None:
    """Asks an assignment's engine for it; `need` is its sample's, and `to` has room for it."""
    transition.record(RecallSent(number, cause, to.name, need.size))
    transition.send(transition.state.assignments[number].engine, Recall(number))


def complete_recall(transition: Transition, number: int) -> None:
    """An assignment that was asked for has come. Where its room is gone, its sample waits like any other."""
    assignment = transition.state.assignments[number]
    name, to = assignment.sample, transition.state.engines.get(assignment.goes_to)
    draining = transition.state.engines[assignment.engine].draining
    move(transition, number, assignment.asked or ("draining" if draining else "rebalanced"), cancel=False)
    sample = transition.state.samples.get(name)
    if to is None or sample is None or sample.phase is not SamplePhase.WAITING:
        return
    need, group = placement_request(transition.state, name), transition.state.groups[sample.group].group
    able = has_slot(to, transition.now) and fits(to, need)
    if able and may_generate(transition.state, to, group.min_version, group.max_version, transition.now):
        assign(transition, name, to, need.unread(to, to.name in sibling_engines(transition.state, group)))
