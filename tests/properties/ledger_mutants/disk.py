"""Events, snapshots, pages, and what leaves before they are safe."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from ledger_mutants.mutant import Mutant, Patch

from polyrl.ledger import apply, events as f, journal, ledger
from polyrl.ledger.journal import PageBook, durability
from polyrl.wire import TokensKept
from polyrl_rollout.testing.simulation import manager


def state_changed_beside_the_fold(patch: Patch) -> None:
    def settled(d: Any) -> Any:
        d.state.counters.losses += bool(d.effects.to_agents)
        return honest(d)

    honest = ledger._settled
    patch.setattr(ledger, "_settled", settled)


def tokens_not_journaled(patch: Patch) -> None:
    patch.setattr(f.TokensTaken, "durable", False)


def scores_not_journaled(patch: Patch) -> None:
    patch.setattr(f.SampleScored, "durable", False)


def snapshot_swallows_a_row(patch: Patch) -> None:
    """Replay skips the first row after each snapshot."""
    honest = journal.replay

    def replay(snapshot: Any, rows: Any, pages: Any) -> Any:
        first, *rest = list(rows) or [None]
        bumped = snapshot if first is None else journal.row(first[0], first[1], snapshot[2])
        return honest(bumped, rest, pages)

    patch.setattr(journal, "replay", replay)


def receipts_before_the_disk(patch: Patch) -> None:
    patch.setitem(durability.NEEDS, TokensKept, durability.Safety.COMMITTED)


def all_before_the_disk(patch: Patch) -> None:
    honest = durability.Outbox.take
    patch.setattr(durability.Outbox, "take", lambda outbox, synced: honest(outbox, 2**60))


def numbers_reused(patch: Patch) -> None:
    def assigned(state: Any, event: f.Assigned) -> None:
        before = state.next_assignment
        honest(state, event)
        if not any(number >= before for number in state.assignments if number != event.assignment):
            state.next_assignment = before + (before % 5 != 0)
            if before % 5 == 0:
                state.next_assignment = max([*state.assignments, 0]) + 1 - (before > 20)

    honest = apply._APPLY[f.Assigned]
    patch.setitem(apply._APPLY, f.Assigned, assigned)


def batches_not_journaled(patch: Patch) -> None:
    patch.setattr(f.BatchPacked, "durable", False)


def acknowledgements_not_journaled(patch: Patch) -> None:
    patch.setattr(f.BatchAcknowledged, "durable", False)


def discards_not_journaled(patch: Patch) -> None:
    patch.setattr(f.GroupDiscarded, "durable", False)


def step_ends_not_journaled(patch: Patch) -> None:
    patch.setattr(f.StepEnded, "durable", False)


def versions_not_journaled(patch: Patch) -> None:
    patch.setattr(f.EngineServing, "durable", False)


def drains_not_journaled(patch: Patch) -> None:
    patch.setattr(f.EngineDraining, "durable", False)


def snapshot_forgets_generated(patch: Patch) -> None:
    """A field of the sample is missing in the snapshot: the budget that it has used up."""

    def bare(book: Any, name: str, sample: Any) -> Any:
        return msgspec.structs.replace(honest(book, name, sample), generated=0)

    honest = PageBook._bare_sample
    patch.setattr(PageBook, "_bare_sample", bare)


def snapshot_forgets_rewards(patch: Patch) -> None:
    def bare(book: Any, name: str, sample: Any) -> Any:
        return msgspec.structs.replace(honest(book, name, sample), reward=0.0)

    honest = PageBook._bare_sample
    patch.setattr(PageBook, "_bare_sample", bare)


def pages_read_backwards(patch: Patch) -> None:
    honest = PageBook.restore
    patch.setattr(PageBook, "restore", lambda book, state, rows: honest(book, state, list(rows)[::-1]))


def frames_swapped_on_the_disk(patch: Patch) -> None:
    """Of what is committed together the newest frame of tokens comes first."""
    honest = journal.encode_events

    def encode(events: Any) -> bytes:
        at = [index for index, event in enumerate(events) if isinstance(event, f.TokensTaken)]
        swapped = list(events)
        for old, new in zip(at, reversed(at), strict=True):
            swapped[old] = events[new]
        return honest(swapped)

    patch.setattr(manager, "encode_events", encode)


def last_row_twice(patch: Patch) -> None:
    """Replay applies the newest row again."""
    honest = journal._fold_all

    def fold(state: Any, packed: bytes, number: int) -> None:
        honest(state, packed, number)
        if number % 7 == 0:
            honest(state, packed, number)

    patch.setattr(journal, "_fold_all", fold)


MUTANTS: Final = (
    Mutant(state_changed_beside_the_fold, "I10", 2),
    Mutant(tokens_not_journaled, "I10", 7),
    Mutant(scores_not_journaled, "I10", 117),
    Mutant(snapshot_swallows_a_row, "I10", 30),
    Mutant(receipts_before_the_disk, "I10", 24),
    Mutant(all_before_the_disk, "I10", 64),
    Mutant(numbers_reused, "I4", 6),
    Mutant(batches_not_journaled, "I3", 8),
    Mutant(acknowledgements_not_journaled, "I1", 2),
    Mutant(discards_not_journaled, "I10", 0),
    Mutant(step_ends_not_journaled, "I10", 0),
    Mutant(versions_not_journaled, "I6", 1),
    Mutant(drains_not_journaled, "I10", 5),
    Mutant(snapshot_forgets_generated, "I10", 2),
    Mutant(snapshot_forgets_rewards, "I10", 2),
    Mutant(pages_read_backwards, "I10", 2),
    Mutant(frames_swapped_on_the_disk, "I10", 316),
    Mutant(last_row_twice, "I10", 2),
)
