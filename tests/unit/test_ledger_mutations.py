"""Ledgers broken on purpose: the simulation's invariants must notice each of them within a few schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polyrl.ledger import (
    deltas,
    discards,
    fold,
    fold_engines,
    fold_samples,
    leases,
    ledger,
    moves,
    packing,
    placement,
    reserved,
    trainer,
)
from polyrl.ledger import facts as f
from polyrl.sample import Finish, Purpose
from polyrl.simulation import Violation, draw_schedule, run_schedule
from polyrl.wire import Acknowledge

SEEDS = 300
Patch = pytest.MonkeyPatch


def no_overlap_trimming(patch: Patch) -> None:
    """Every row is taken as if it began where we are."""

    def blind(d: Any, engine: Any, version: int, columns: Any) -> list[tuple[int, int]] | None:
        numbers, _, counts, finishes = columns
        live = d.state.assignments
        if any(n not in live or live[n].length + c > live[n].limit for n, c in zip(numbers, counts, strict=True)):
            return honest(d, engine, version, columns)
        return [(n, e) for n, e in zip(numbers, finishes, strict=True) if e or live[n].length == live[n].limit]

    honest = deltas._ends_if_in_order
    patch.setattr(deltas, "_ends_if_in_order", blind)


def gap_ignored(patch: Patch) -> None:
    """A row beyond a gap is appended."""
    honest = deltas._Sift.row

    def row(self: Any, number: int, offset: int, count: int, finish: int) -> None:
        assignment = self._d.state.assignments.get(number)
        if assignment is not None and number not in self._ahead:
            offset = min(offset, assignment.length)
        honest(self, number, offset, count, finish)

    patch.setattr(deltas._Sift, "row", row)


def foreign_version_taken(patch: Patch) -> None:
    """The version that a frame claims is believed."""

    def serve(engine: Any, version: int) -> None:
        engine.version = version
        engine.served[:] = range(100)

    def assigned(state: Any, fact: f.Assigned) -> None:
        honest(state, fact)
        state.assignments[fact.assignment].high = 99

    honest = fold._FOLDS[f.Assigned]
    patch.setattr(fold_engines, "_serve", serve)
    patch.setitem(fold._FOLDS, f.Assigned, assigned)


def placed_on_any_version(patch: Patch) -> None:
    patch.setattr(placement, "may_generate", lambda state, engine, low, high, now: True)


def sample_lost_when_moved(patch: Patch) -> None:
    def moved(state: Any, fact: f.Moved) -> None:
        sample = state.samples[state.assignments[fact.assignment].sample]
        honest(state, fact)
        fold_samples._unqueue_sample(state, sample)

    honest = fold._FOLDS[f.Moved]
    patch.setitem(fold._FOLDS, f.Moved, moved)


def budget_forgotten_when_moved(patch: Patch) -> None:
    def moved(state: Any, fact: f.Moved) -> None:
        sample = state.samples[state.assignments[fact.assignment].sample]
        honest(state, fact)
        sample.generated = 0

    honest = fold._FOLDS[f.Moved]
    patch.setitem(fold._FOLDS, f.Moved, moved)


def tokens_lost_when_moved(patch: Patch) -> None:
    def moved(state: Any, fact: f.Moved) -> None:
        sample = state.samples[state.assignments[fact.assignment].sample]
        honest(state, fact)
        del sample.ids[-4:]

    honest = fold._FOLDS[f.Moved]
    patch.setitem(fold._FOLDS, f.Moved, moved)


def stop_token_fed_back(patch: Patch) -> None:
    """A sample whose last token is a stop token is generated on."""

    def over(d: Any, sample: Any) -> Finish | None:
        budget = d.state.groups[sample.group].group.sampling.max_new_tokens
        return Finish.LENGTH if sample.generated >= budget else None

    for module in (moves, trainer, deltas):
        patch.setattr(module, "already_over", over)


def incomplete_groups_packed(patch: Patch) -> None:
    def complete(d: Any, number: int) -> None:
        entry = d.state.groups[number]
        if entry.scored == max(1, entry.group.n - 1):
            d.record(f.GroupCompleted(number, d.now))

    patch.setattr(trainer, "_complete", complete)


def packed_twice(patch: Patch) -> None:
    """A packed group stays ready."""

    def packed(state: Any, fact: f.BatchPacked) -> None:
        honest(state, fact)
        for number in fact.groups:
            group = state.groups[number].group
            state.steps[f"{group.purpose.value}/{group.step}"].ready.append(number)

    honest = fold._FOLDS[f.BatchPacked]
    patch.setitem(fold._FOLDS, f.BatchPacked, packed)


def acknowledged_twice(patch: Patch) -> None:
    def acknowledge(d: Any, message: Any) -> None:
        for batch in tuple(d.state.batches):
            if batch <= message.batch + 1:
                d.record(f.BatchAcknowledged(batch, d.now))

    patch.setitem(trainer._HANDLERS, Acknowledge, acknowledge)


def last_is_said_too_early(patch: Patch) -> None:
    honest = packing.pack

    def pack(state: Any, request: Any) -> Any:
        packed = honest(state, request)
        return packed._replace(last=True) if packed is not None and packed.groups else packed

    patch.setattr(packing, "pack", pack)


def repeated_next_packs_anew(patch: Patch) -> None:
    def ask(d: Any, message: Any) -> None:
        if message.request in d.state.pending:
            d.record(f.NextClosed(message.request))
        d.record(f.NextAsked(message, d.now))

    patch.setattr(trainer, "_next", ask)


def silence_unnoticed(patch: Patch) -> None:
    patch.setattr(leases, "_end_leases", lambda d: None)


def impatient_leases(patch: Patch) -> None:
    def end(d: Any) -> None:
        for engine in tuple(d.state.engines.values()):
            if engine.heard_at + d.config.lease_s / 3 <= d.now:
                leases.lose_engine(d, engine.name, "silent")

    patch.setattr(leases, "_end_leases", end)


def stalls_unnoticed(patch: Patch) -> None:
    patch.setattr(leases, "_find_stalled", lambda d: None)


def drained_engine_gets_work(patch: Patch) -> None:
    patch.setattr(placement, "has_slot", lambda engine, now: len(engine.running) < engine.max_running)
    patch.setattr(reserved, "serves", lambda engine, low, high: low <= engine.version <= high)


def credit_ignored(patch: Patch) -> None:
    patch.setattr(placement, "has_slot", lambda engine, now: engine.version >= 0 and not engine.draining)


def dropped_in_silence(patch: Patch) -> None:
    def discard(d: Any, number: int, *rest: Any, **_: Any) -> None:
        honest(d, number, *rest, notify=False)

    honest = discards.discard_group
    for module in (moves, trainer, discards):
        patch.setattr(module, "discard_group", discard)


def verdicts_never_asked_again(patch: Patch) -> None:
    patch.setattr(leases, "_ask_again", lambda d: None)


def state_changed_beside_the_fold(patch: Patch) -> None:
    def settled(d: Any) -> Any:
        d.state.counters.turns += bool(d.outcome.to_agents)
        return honest(d)

    honest = ledger._settled
    patch.setattr(ledger, "_settled", settled)


def numbers_reused(patch: Patch) -> None:
    def assigned(state: Any, fact: f.Assigned) -> None:
        before = state.next_assignment
        honest(state, fact)
        if not any(number >= before for number in state.assignments if number != fact.assignment):
            state.next_assignment = before + (before % 5 != 0)
            if before % 5 == 0:
                state.next_assignment = max([*state.assignments, 0]) + 1 - (before > 20)

    honest = fold._FOLDS[f.Assigned]
    patch.setitem(fold._FOLDS, f.Assigned, assigned)


def evaluation_never_complete(patch: Patch) -> None:
    honest = trainer._complete

    def complete(d: Any, number: int) -> None:
        if d.state.groups[number].group.purpose is not Purpose.EVAL:
            honest(d, number)

    patch.setattr(trainer, "_complete", complete)


MUTANTS: list[Callable[[Patch], None]] = [
    no_overlap_trimming,
    gap_ignored,
    foreign_version_taken,
    placed_on_any_version,
    sample_lost_when_moved,
    budget_forgotten_when_moved,
    tokens_lost_when_moved,
    stop_token_fed_back,
    incomplete_groups_packed,
    packed_twice,
    acknowledged_twice,
    last_is_said_too_early,
    repeated_next_packs_anew,
    silence_unnoticed,
    impatient_leases,
    stalls_unnoticed,
    drained_engine_gets_work,
    credit_ignored,
    dropped_in_silence,
    verdicts_never_asked_again,
    state_changed_beside_the_fold,
    numbers_reused,
    evaluation_never_complete,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_ledger_is_noticed(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    for seed in range(SEEDS):
        try:
            run_schedule(draw_schedule(seed))
        except Violation as violation:
            print(f"{mutant.__name__}: seed {seed}: {violation}")
            return
        except (KeyError, ValueError, IndexError, AssertionError) as error:
            print(f"{mutant.__name__}: seed {seed}: the ledger itself stumbles: {error!r}")
            return
    pytest.fail(f"{mutant.__name__} went unnoticed in {SEEDS} schedules")
