"""What the trainer asks for and gets."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from ledger_mutants.mutant import Mutant, Patch, after

from polyrl.ledger import apply, batching, events as f
from polyrl.ledger.messages import trainer
from polyrl.ledger.scheduling import leases
from polyrl.ledger.state import step_key
from polyrl.wire import Acknowledge


def incomplete_groups_packed(patch: Patch) -> None:
    def complete(d: Any, number: int) -> None:
        entry = d.state.groups[number]
        if entry.scored == max(1, entry.group.n - 1):
            d.record(f.GroupCompleted(number, d.now))

    patch.setattr(trainer, "_complete", complete)


def packed_twice(patch: Patch) -> None:
    """A packed group stays ready."""

    def packed(state: Any, event: f.BatchPacked) -> None:
        honest(state, event)
        for number in event.groups:
            group = state.groups[number].group
            state.steps[f"{group.purpose.value}/{group.step}"].ready.append(number)

    honest = apply._APPLY[f.BatchPacked]
    patch.setitem(apply._APPLY, f.BatchPacked, packed)


def acknowledged_twice(patch: Patch) -> None:
    def acknowledge(d: Any, message: Any) -> None:
        for batch in tuple(d.state.batches):
            if batch <= message.batch + 1:
                d.record(f.BatchAcknowledged(batch, d.now))

    patch.setitem(trainer._HANDLERS, Acknowledge, acknowledge)


def last_is_announced_too_early(patch: Patch) -> None:
    honest = batching.pack

    def pack(state: Any, request: Any) -> Any:
        packed = honest(state, request)
        return packed._replace(last=True) if packed is not None and packed.groups else packed

    patch.setattr(batching, "pack", pack)


def optimizer_step_overfilled(patch: Patch) -> None:
    """A batch takes all that is ready, whatever is missing to the mini-batch."""
    honest = batching.pack

    def pack(state: Any, request: Any) -> Any:
        return honest(state, msgspec.structs.replace(request, max_samples=1000))

    patch.setattr(batching, "pack", pack)


def repeated_next_packs_anew(patch: Patch) -> None:
    def ask(d: Any, message: Any) -> None:
        if message.request in d.state.pending:
            d.record(f.BatchRequestClosed(message.request))
        d.record(f.BatchRequested(message, d.now))

    patch.setattr(trainer, "_next", ask)


def dead_trainers_batches_kept(patch: Patch) -> None:
    """What was packed for a trainer that is gone stays packed."""
    patch.setattr(trainer, "_take_back", lambda d: None)


def no_minimum(patch: Patch) -> None:
    """A batch leaves with the first complete group."""
    honest = batching.pack
    patch.setattr(batching, "pack", lambda state, wanted: honest(state, msgspec.structs.replace(wanted, min_samples=1)))


def no_bound_of_tokens(patch: Patch) -> None:
    honest = batching.pack
    patch.setattr(
        batching, "pack", lambda state, wanted: honest(state, msgspec.structs.replace(wanted, max_tokens=1 << 40))
    )


def last_is_never_announced(patch: Patch) -> None:
    """An exhausted step answers nothing."""

    def pack(state: Any, wanted: Any) -> Any:
        packing = honest(state, wanted)
        return None if packing is not None and packing.last and not packing.groups else packing

    honest = batching.pack
    patch.setattr(batching, "pack", pack)


def late_is_never_answered(patch: Patch) -> None:
    """A request that is not answered in time is not answered."""
    patch.setattr(leases, "close_late", lambda transition: None)


def answers_forgotten(patch: Patch) -> None:
    """A request that comes again is another one."""
    for module in (batching, trainer):
        patch.setattr(module, "answer_again", lambda transition, wanted: False)


def request_open_after_its_batch(patch: Patch) -> None:
    def packed(state: Any, event: f.BatchPacked) -> None:
        state.next_batch = max(1, state.next_batch - 1)

    after(patch, f.BatchPacked, packed)


def lost_batches_numbers_given_again(patch: Patch) -> None:
    """A manager without its journal counts from where it begins."""
    honest = apply._APPLY[f.NumbersTaken]
    patch.setitem(
        apply._APPLY, f.NumbersTaken, lambda state, event: honest(state, msgspec.structs.replace(event, batch=0))
    )


def returned_batch_loses_a_group(patch: Patch) -> None:
    """Of a batch that is offered again the last group stays packed, in no batch."""

    def returned(state: Any, event: f.BatchReturned) -> None:
        groups = state.batches[event.batch].groups if event.batch in state.batches else []
        if len(groups) > 1:
            group = state.groups[groups.pop()].group
            state.steps[step_key(group.step, group.purpose)].packed -= 1
        honest(state, event)

    honest = apply._APPLY[f.BatchReturned]
    patch.setitem(apply._APPLY, f.BatchReturned, returned)


def replaced_trainer_believed(patch: Patch) -> None:
    """The process before this one greets, and is the run's trainer again."""

    def refusal(state: Any, hello: Any) -> str:
        return "" if hello.trainer in state.replaced else honest(state, hello)

    honest = trainer._refusal
    patch.setattr(trainer, "_refusal", refusal)


def first_group_skipped(patch: Patch) -> None:
    """A batch of several groups leaves the first one for later."""

    def pack(state: Any, wanted: Any) -> Any:
        packing = honest(state, wanted)
        several = packing is not None and len(packing.groups) > 1
        return packing._replace(groups=packing.groups[1:], last=False) if several else packing

    honest = batching.pack
    patch.setattr(batching, "pack", pack)


MUTANTS: Final = (
    Mutant(returned_batch_loses_a_group, "I2", 311),
    Mutant(replaced_trainer_believed, "I5", 47),
    Mutant(first_group_skipped, "I2", 2),
    Mutant(lost_batches_numbers_given_again, "I2", 107),
    Mutant(incomplete_groups_packed, "I2", 0),
    Mutant(packed_twice, "I2", 3),
    Mutant(acknowledged_twice, "I1", 2),
    Mutant(last_is_announced_too_early, "I2", 7),
    Mutant(optimizer_step_overfilled, "I3", 29),
    Mutant(repeated_next_packs_anew, "I5", 41),
    Mutant(dead_trainers_batches_kept, "I5", 23),
    Mutant(no_minimum, "I2", 16),
    Mutant(no_bound_of_tokens, "I3", 10),
    Mutant(last_is_never_announced, "I5", 73),
    Mutant(late_is_never_answered, "I5", 22),
    Mutant(answers_forgotten, "I5", 41),
    Mutant(request_open_after_its_batch, "I2", 7),
)
