"""A trainer greets: for the first time, after a broken connection, or as another process that has started again.

    the same process     what it missed is said again; nothing changes
    another process      the one before is fenced for good; what that one asked for is closed, the batches that it did
                         not acknowledge are offered again; a fresh one is told what is held for it
    knows more than we   our journal is lost: the numbers that it knows are taken, so nothing old is mistaken for new

Refuses to hold: what the newcomer can still use of what is held (it says so, by Submit and Reject).
Read next: `trainer`.
"""

from __future__ import annotations

from polyrl.ledger.events import (
    BatchAcknowledged,
    BatchRequestClosed,
    BatchReturned,
    NumbersTaken,
    TrainerGreeted,
    TrainerHeard,
)
from polyrl.ledger.messages.group_numbers import next_number
from polyrl.ledger.responses import turn_done
from polyrl.ledger.state import GroupState, LedgerState
from polyrl.ledger.transition import Transition
from polyrl.sample import group_digest, sample_id
from polyrl.wire import SUPERSEDED, Fenced, HeldGroup, TrainerHello, TrainerWelcome


def greet_trainer(transition: Transition, hello: TrainerHello) -> None:
    """Welcome, and all that a trainer may have missed; or Fenced."""
    refusal = _refusal(transition.state, hello)
    if refusal:
        transition.ignore("fencedTrainer")
        transition.answer(Fenced(refusal))
        return
    newcomer = hello.trainer != transition.state.trainer
    transition.record(TrainerHeard(transition.now))
    transition.record(TrainerGreeted(hello.trainer, transition.now))
    for batch in tuple(transition.state.batches):
        if batch <= hello.acknowledged:
            transition.record(BatchAcknowledged(batch, transition.now))
    if newcomer:
        _take_back(transition)
    if hello.next_group > next_number(transition.state) or hello.next_batch > transition.state.next_batch:
        transition.record(NumbersTaken(hello.next_group, hello.next_batch, 0, transition.now))
    transition.answer(_welcome(transition.state, with_held=hello.fresh))
    _say_again(transition)


def _refusal(state: LedgerState, hello: TrainerHello) -> str:
    if hello.run_epoch != state.config.run_epoch:
        return f"this is epoch {state.config.run_epoch}, not {hello.run_epoch}"
    return SUPERSEDED if hello.trainer in state.replaced else ""


def _take_back(transition: Transition) -> None:
    """What went to the trainer before can be asked for again, in the order in which it was packed."""
    for request in tuple(transition.state.pending):
        transition.record(BatchRequestClosed(request))
    for batch in sorted(transition.state.batches, reverse=True):
        transition.record(BatchReturned(batch, transition.now))


def _welcome(state: LedgerState, *, with_held: bool) -> TrainerWelcome:
    config, version = state.config, state.version
    held = tuple(_held(state, entry) for entry in state.groups.values()) if with_held else ()
    newest = (version.version, version.manifest_hash)
    return TrainerWelcome(
        config.run_epoch, config.lease_s, config.beat_s, config.journal, next_number(state), *newest, held
    )


def _held(state: LedgerState, entry: GroupState) -> HeldGroup:
    group = entry.group
    turn = max(state.samples[sample_id(group.id, index)].turn for index in range(group.n))
    versions = (group.min_version, group.max_version)
    return HeldGroup(group.id, group.step, group.purpose, group_digest(group), *versions, entry.scored, turn)


def _say_again(transition: Transition) -> None:
    for step in transition.state.steps.values():
        for notice in step.notices:
            transition.answer(notice)
    for name in transition.state.asked:
        transition.answer(turn_done(transition.state, name))
