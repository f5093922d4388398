"""A trainer greets: for the first time, after a broken connection, or as another process that has started again.

    the same process     what it missed is said again; nothing changes
    another process      the one before is fenced for good; what that one asked for is closed, the batches that it did
                         not acknowledge are offered again; a fresh one is told what is held for it
    knows more than we   our journal is lost: the numbers that it knows are taken, so nothing old is mistaken for new

Refuses to hold: what the newcomer can still use of what is held (it says so, by Submit and Reject).
Read next: `trainer`.
"""

from __future__ import annotations

from polyrl.ledger.decision import Decision
from polyrl.ledger.events import (
    BatchAcknowledged,
    BatchReturned,
    NextClosed,
    NumbersTaken,
    TrainerGreeted,
    TrainerHeard,
)
from polyrl.ledger.messages.group_numbers import next_number
from polyrl.ledger.responses import turn_done
from polyrl.ledger.state import GroupState, State
from polyrl.sample import group_digest, sample_id
from polyrl.wire import SUPERSEDED, Fenced, HeldGroup, TrainerHello, TrainerWelcome


def greet_trainer(d: Decision, hello: TrainerHello) -> None:
    """Welcome, and all that a trainer may have missed; or Fenced."""
    refusal = _refusal(d.state, hello)
    if refusal:
        d.ignore("fencedTrainer")
        d.answer(Fenced(refusal))
        return
    newcomer = hello.trainer != d.state.trainer
    d.record(TrainerHeard(d.now))
    d.record(TrainerGreeted(hello.trainer, d.now))
    for batch in tuple(d.state.batches):
        if batch <= hello.acknowledged:
            d.record(BatchAcknowledged(batch, d.now))
    if newcomer:
        _take_back(d)
    if hello.next_group > next_number(d.state) or hello.next_batch > d.state.next_batch:
        d.record(NumbersTaken(hello.next_group, hello.next_batch, 0, d.now))
    d.answer(_welcome(d.state, with_held=hello.fresh))
    _say_again(d)


def _refusal(state: State, hello: TrainerHello) -> str:
    if hello.epoch != state.config.epoch:
        return f"this is epoch {state.config.epoch}, not {hello.epoch}"
    return SUPERSEDED if hello.trainer in state.replaced else ""


def _take_back(d: Decision) -> None:
    """What went to the trainer before can be asked for again, in the order in which it was packed."""
    for request in tuple(d.state.pending):
        d.record(NextClosed(request))
    for batch in sorted(d.state.batches, reverse=True):
        d.record(BatchReturned(batch, d.now))


def _welcome(state: State, *, with_held: bool) -> TrainerWelcome:
    config, version = state.config, state.version
    held = tuple(_held(state, entry) for entry in state.groups.values()) if with_held else ()
    newest = (version.version, version.manifest_hash)
    return TrainerWelcome(
        config.epoch, config.lease_s, config.beat_s, config.journal, next_number(state), *newest, held
    )


def _held(state: State, entry: GroupState) -> HeldGroup:
    group = entry.group
    turn = max(state.samples[sample_id(group.id, index)].turn for index in range(group.n))
    versions = (group.min_version, group.max_version)
    return HeldGroup(group.id, group.step, group.purpose, group_digest(group), *versions, entry.scored, turn)


def _say_again(d: Decision) -> None:
    for step in d.state.steps.values():
        for notice in step.notices:
            d.answer(notice)
    for name in d.state.asked:
        d.answer(turn_done(d.state, name))
