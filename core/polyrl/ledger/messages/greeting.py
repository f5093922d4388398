"""A trainer greets: for the first time, after a broken connection, or as another process that has started again.

    the same process     what it missed is sent again; nothing changes
    another process      the one before is fenced for good; what that one asked for is closed, the batches that it did
                         not acknowledge are offered again; a fresh one learns what is held for it
    knows more than we   our journal is lost: the numbers that it knows are taken, so nothing old is mistaken for new

What the newcomer can still use of what is held, it says itself, by Submit and Reject.
"""

from __future__ import annotations

from polyrl.ledger import events
from polyrl.ledger.responses import turn_done
from polyrl.ledger.state import GroupState, LedgerState
from polyrl.ledger.transition import Transition
from polyrl.sample import group_digest, sample_id
from polyrl.wire import SUPERSEDED, Fenced, HeldGroup, TrainerHello, TrainerWelcome


def greet_trainer(transition: Transition, hello: TrainerHello) -> None:
    """Welcome, and all that a trainer may have missed; or Fenced."""
    state, now = transition.state, transition.now
    refusal = _refusal(state, hello)
    if refusal:
        transition.ignore("fencedTrainer")
        transition.answer(Fenced(refusal))
        return
    newcomer = hello.trainer != state.trainer
    transition.record(events.TrainerHeard(now))
    transition.record(events.TrainerGreeted(hello.trainer, now))
    for batch in tuple(state.batches):
        if batch <= hello.acknowledged:
            transition.record(events.BatchAcknowledged(batch, now))
    if newcomer:
        _take_back(transition)
    if hello.next_group > state.next_group or hello.next_batch > state.next_batch:
        transition.record(events.NumbersTaken(hello.next_group, hello.next_batch, assignment=0, at=now))
    transition.answer(_welcome(state, with_held=hello.fresh))
    _send_again(transition)


def _refusal(state: LedgerState, hello: TrainerHello) -> str:
    if hello.run_epoch != state.config.run_epoch:
        return f"this is epoch {state.config.run_epoch}, not {hello.run_epoch}"
    return SUPERSEDED if hello.trainer in state.replaced else ""


def _take_back(transition: Transition) -> None:
    """What went to the trainer before can be asked for again, in the order in which it was packed."""
    for request in tuple(transition.state.pending):
        transition.record(events.BatchRequestClosed(request))
    for batch in sorted(transition.state.batches, reverse=True):
        transition.record(events.BatchReturned(batch, transition.now))


def _welcome(state: LedgerState, *, with_held: bool) -> TrainerWelcome:
    config = state.config
    return TrainerWelcome(
        config.run_epoch,
        config.lease_s,
        beat_s=config.beat_s,
        journal=config.journal,
        next_group=state.next_group,
        version=state.weights.version,
        manifest_hash=state.weights.manifest_hash,
        held=tuple(_held(state, entry) for entry in state.groups.values()) if with_held else (),
    )


def _held(state: LedgerState, entry: GroupState) -> HeldGroup:
    group = entry.group
    return HeldGroup(
        group.id,
        group.step,
        purpose=group.purpose,
        digest=group_digest(group),
        min_version=group.min_version,
        max_version=group.max_version,
        scored=entry.scored,
        turn=max(state.samples[sample_id(group.id, index)].turn for index in range(group.n)),
    )


def _send_again(transition: Transition) -> None:
    for step in transition.state.steps.values():
        for notice in step.notices:
            transition.answer(notice)
    for name in transition.state.awaiting_verdict:
        transition.answer(turn_done(transition.state, name))
