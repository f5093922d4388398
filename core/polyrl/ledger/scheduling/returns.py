"""How a sample leaves a healthy engine for another one: it is asked for, and comes with all its tokens.

    ask_back     the other engine sets room aside, the present one stops the sample and sends what it has made of it
    take_back    it has come: its assignment ends, and the other engine goes on with it

So none of its tokens is generated twice. An engine that does not hear goes on with the sample, and greets anew since
nobody confirms its tokens; then it is asked again, and no room is held for what it was asked before. One that falls
silent loses the sample by its lease, with the tokens that it had not sent.

Refuses to hold: who leaves, and for where (see `drains`, `rebalance`). Read next: `moves`.
"""

from __future__ import annotations

from polyrl.ledger.decision import Decision
from polyrl.ledger.events import ReturnAsked
from polyrl.ledger.scheduling.moves import move
from polyrl.ledger.scheduling.placement import Need, assign, fits, has_slot, homes_of, need_of
from polyrl.ledger.scheduling.reserved import may_generate
from polyrl.ledger.state import Engine, Phase
from polyrl.wire import Return


def ask_back(d: Decision, number: int, cause: str, to: Engine, need: Need) -> None:
    """Asks an assignment's engine for it; `need` is its sample's, and `to` has room for it."""
    d.record(ReturnAsked(number, cause, to.name, need.size))
    d.tell(d.state.assignments[number].engine, Return(number))


def take_back(d: Decision, number: int) -> None:
    """An assignment that was asked for has come. Where its room is gone, its sample waits like any other."""
    assignment = d.state.assignments[number]
    name, to = assignment.sample, d.state.engines.get(assignment.goes_to)
    draining = d.state.engines[assignment.engine].draining
    move(d, number, assignment.asked or ("draining" if draining else "rebalanced"), cancel=False)
    sample = d.state.samples.get(name)
    if to is None or sample is None or sample.phase is not Phase.WAITING:
        return
    need, group = need_of(d.state, name), d.state.groups[sample.group].group
    able = has_slot(to, d.now) and fits(to, need)
    if able and may_generate(d.state, to, group.min_version, group.max_version, d.now):
        assign(d, name, to, need.unread(to, to.name in homes_of(d.state, group)))
