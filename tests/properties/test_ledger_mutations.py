"""Ledgers broken on purpose: the invariant that speaks of it must notice each of them within a few schedules."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import msgspec
import pytest

from polyrl.ledger import apply, batching, events as f, journal, ledger
from polyrl.ledger.apply import engines, samples
from polyrl.ledger.journal import durability
from polyrl.ledger.messages import agents, deltas, trainer
from polyrl.ledger.scheduling import cost, leases, moves, placement, rebalance, recalls
from polyrl.sample import DiscardReason, Finish, Purpose
from polyrl.wire import Acknowledge, Resend, TokensKept, pack_rows
from polyrl_rollout.testing.simulation import Violation, draw_schedule, run_schedule

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
        assignment = self._transition.state.assignments.get(number)
        if assignment is not None and number not in self._ahead:
            offset = min(offset, assignment.length)
        honest(self, number, offset, count, finish)

    patch.setattr(deltas._Sift, "row", row)


def foreign_version_taken(patch: Patch) -> None:
    """The version that a frame claims is believed."""

    def serve(engine: Any, version: int) -> None:
        engine.version = version
        engine.served[:] = range(100)

    def assigned(state: Any, event: f.Assigned) -> None:
        honest(state, event)
        state.assignments[event.assignment].high = 99

    honest = apply._APPLY[f.Assigned]
    patch.setattr(engines, "_serve", serve)
    patch.setitem(apply._APPLY, f.Assigned, assigned)


def placed_on_any_version(patch: Patch) -> None:
    patch.setattr(placement, "may_generate", lambda transition, engine, low, high: True)


def sample_lost_when_moved(patch: Patch) -> None:
    def moved(state: Any, event: f.Moved) -> None:
        sample = state.samples[state.assignments[event.assignment].sample]
        honest(state, event)
        samples._unqueue_sample(state, sample)

    honest = apply._APPLY[f.Moved]
    patch.setitem(apply._APPLY, f.Moved, moved)


def budget_forgotten_when_moved(patch: Patch) -> None:
    def moved(state: Any, event: f.Moved) -> None:
        sample = state.samples[state.assignments[event.assignment].sample]
        honest(state, event)
        sample.generated = 0

    honest = apply._APPLY[f.Moved]
    patch.setitem(apply._APPLY, f.Moved, moved)


def tokens_lost_when_moved(patch: Patch) -> None:
    def moved(state: Any, event: f.Moved) -> None:
        sample = state.samples[state.assignments[event.assignment].sample]
        honest(state, event)
        del sample.ids[-4:]

    honest = apply._APPLY[f.Moved]
    patch.setitem(apply._APPLY, f.Moved, moved)


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


def repeated_next_packs_anew(patch: Patch) -> None:
    def ask(d: Any, message: Any) -> None:
        if message.request in d.state.pending:
            d.record(f.BatchRequestClosed(message.request))
        d.record(f.BatchRequested(message, d.now))

    patch.setattr(trainer, "_next", ask)


def silence_unnoticed(patch: Patch) -> None:
    patch.setattr(leases, "_end_leases", lambda d: None)


def impatient_leases(patch: Patch) -> None:
    def end(d: Any) -> None:
        for engine in tuple(d.state.engines.values()):
            if engine.heard_at + d.config.lease_s / 3 <= d.now:
                leases.lose_engine(d, engine.name, "silent")

    patch.setattr(leases, "_end_leases", end)


def silent_engine_gets_work(patch: Patch) -> None:
    """Its silence is noticed, and taken for a sign of life."""

    def silent(state: Any, event: f.EngineSilent) -> None:
        honest(state, event)
        state.engines[event.engine].silent, state.engines[event.engine].heard_at = False, event.at

    honest = apply._APPLY[f.EngineSilent]
    patch.setitem(apply._APPLY, f.EngineSilent, silent)


def stalls_unnoticed(patch: Patch) -> None:
    patch.setattr(leases, "_find_stalled", lambda d: inf)


def drained_engine_gets_work(patch: Patch) -> None:
    for module in (placement, rebalance, recalls):
        patch.setattr(module, "has_slot", lambda engine, now: len(engine.running) < engine.capacity.max_running)
    patch.setattr(cost, "serves", lambda engine, low, high: low <= engine.version <= high)


def credit_ignored(patch: Patch) -> None:
    for module in (placement, rebalance, recalls):
        patch.setattr(module, "has_slot", lambda engine, now: engine.version >= 0 and not engine.draining)


def dropped_in_silence(patch: Patch) -> None:
    def discard(d: Any, number: int, *rest: Any, **_: Any) -> None:
        honest(d, number, *rest, notify=False)

    honest = batching.discard_group
    for module in (moves, trainer, batching):
        patch.setattr(module, "discard_group", discard)


def verdicts_never_asked_again(patch: Patch) -> None:
    patch.setattr(leases, "_ask_again", lambda d: inf)


def state_changed_beside_the_fold(patch: Patch) -> None:
    def settled(d: Any) -> Any:
        d.state.counters.losses += bool(d.effects.to_agents)
        return honest(d)

    honest = ledger._settled
    patch.setattr(ledger, "_settled", settled)


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


def optimizer_step_overfilled(patch: Patch) -> None:
    """A batch takes all that is ready, whatever is missing to the mini-batch."""
    honest = batching.pack

    def pack(state: Any, request: Any) -> Any:
        return honest(state, msgspec.structs.replace(request, max_samples=1000))

    patch.setattr(batching, "pack", pack)


def dead_idle_engine_kept(patch: Patch) -> None:
    """Only engines that run something are given up."""

    def end(d: Any) -> None:
        for engine in tuple(d.state.engines.values()):
            if engine.running and engine.heard_at + d.config.lease_s <= d.now:
                leases.lose_engine(d, engine.name, "silent")

    patch.setattr(leases, "_end_leases", end)


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


def everything_asked_for_again(patch: Patch) -> None:
    """After every frame the response so far is asked for once more: bytes grow with the square of its length."""
    honest = deltas.take_deltas

    def take(d: Any, engine: Any, message: Any) -> None:
        honest(d, engine, message)
        for number in engine.running:
            sample = d.state.samples[d.state.assignments[number].sample]
            if sample.spans and sample.spans[-1].attempt == sample.attempt:
                d.send(engine.name, Resend(number, sample.spans[-1].start))

    patch.setattr(agents, "take_deltas", take)


def refused_tokens_uncounted(patch: Patch) -> None:
    def refuse(self: Any, number: int, count: int, cause: str) -> None:
        honest(self, number, count, cause)
        self.in_vain -= count

    honest = deltas._Sift._refuse
    patch.setattr(deltas._Sift, "_refuse", refuse)


def evaluation_never_complete(patch: Patch) -> None:
    honest = trainer._complete

    def complete(d: Any, number: int) -> None:
        if d.state.groups[number].group.purpose is not Purpose.EVAL:
            honest(d, number)

    patch.setattr(trainer, "_complete", complete)


def dead_trainers_batches_kept(patch: Patch) -> None:
    """What was packed for a trainer that is gone stays packed."""
    patch.setattr(trainer, "_take_back", lambda d: None)


def finished_groups_discarded(patch: Patch) -> None:
    """No training group passes the filter, whatever it is."""
    honest = trainer.passes
    patch.setattr(trainer, "passes", lambda name, rewards: name != "none" and honest(name, rewards))


def lost_engines_groups_discarded(patch: Patch) -> None:
    """What an engine that is gone was generating is given up, with its siblings."""

    def lose(d: Any, name: str, cause: Any) -> None:
        running = [d.state.assignments[number].sample for number in d.state.engines[name].running]
        for number in {d.state.samples[sample].group for sample in running}:
            batching.discard_group(d, number, DiscardReason.ENGINE_REJECTED, detail="its engine is gone")
        honest(d, name, cause)

    honest = leases.lose_engine
    for module in (leases, agents):
        patch.setattr(module, "lose_engine", lose)


def surplus_ended_early(patch: Patch) -> None:
    """A group that is complete before its step has ended is called surplus."""

    def complete(d: Any, number: int) -> None:
        if number % 5 == 0:
            batching.discard_group(d, number, DiscardReason.SURPLUS)
        else:
            honest(d, number)

    honest = trainer._complete
    patch.setattr(trainer, "_complete", complete)


def first_rejection_believed(patch: Patch) -> None:
    patch.setattr(moves, "_is_refused", lambda d, sample: True)


def stale_too_early(patch: Patch) -> None:
    """A version that may just be used is called too old."""
    patch.setattr(moves, "_is_stale", lambda d, high: d.state.weights.version >= high)


def rows_that_bring_nothing(patch: Patch) -> None:
    """A frame grows by 335 empty rows per token: 4,032 bytes each."""
    original = deltas.take_deltas

    def take(d: Any, engine: Any, message: Any) -> None:
        rows = len(message.ids) // 4 * 335
        original(d, engine, msgspec.structs.replace(message, rows=message.rows + pack_rows([(0, 0, 0, 0)] * rows)))

    patch.setattr(agents, "take_deltas", take)


def one_sample_per_engine(patch: Patch) -> None:
    def has_slot(engine: Any, now: float) -> bool:
        return not engine.occupied and honest(engine, now)

    honest = cost.has_slot
    for module in (placement, rebalance, recalls):
        patch.setattr(module, "has_slot", has_slot)


MUTANTS: list[tuple[Callable[[Patch], None], str]] = [
    (no_overlap_trimming, "I4"),
    (gap_ignored, "I4"),
    (foreign_version_taken, "I6"),
    (placed_on_any_version, "I6"),
    (sample_lost_when_moved, "I5"),
    (budget_forgotten_when_moved, "I4"),
    (tokens_lost_when_moved, "I4"),
    (stop_token_fed_back, "I4"),
    (incomplete_groups_packed, "I2"),
    (packed_twice, "I2"),
    (acknowledged_twice, "I1"),
    (finished_groups_discarded, "I1"),
    (lost_engines_groups_discarded, "I1"),
    (surplus_ended_early, "I1"),
    (first_rejection_believed, "I1"),
    (stale_too_early, "I1"),
    (rows_that_bring_nothing, "I11"),
    (last_is_announced_too_early, "I2"),
    (optimizer_step_overfilled, "I3"),
    (repeated_next_packs_anew, "I5"),
    (silence_unnoticed, "I8"),
    (dead_idle_engine_kept, "I8"),
    (impatient_leases, "I7"),
    (silent_engine_gets_work, "I7"),
    (stalls_unnoticed, "I5"),
    (one_sample_per_engine, "I5"),
    (drained_engine_gets_work, "I7"),
    (credit_ignored, "I7"),
    (dropped_in_silence, "I5"),
    (verdicts_never_asked_again, "I5"),
    (state_changed_beside_the_fold, "I10"),
    (tokens_not_journaled, "I10"),
    (scores_not_journaled, "I10"),
    (snapshot_swallows_a_row, "I10"),
    (receipts_before_the_disk, "I10"),
    (all_before_the_disk, "I10"),
    (numbers_reused, "I4"),
    (everything_asked_for_again, "I11"),
    (refused_tokens_uncounted, "I11"),
    (evaluation_never_complete, "I5"),
    (dead_trainers_batches_kept, "I5"),
]


@pytest.mark.parametrize(("mutant", "invariant"), MUTANTS, ids=[mutant.__name__ for mutant, _ in MUTANTS])
def test_a_broken_ledger_is_noticed(mutant: Callable[[Patch], None], invariant: str, monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    for seed in range(SEEDS):
        try:
            run_schedule(draw_schedule(seed))
        except Violation as violation:
            if violation.invariant == invariant:
                print(f"{mutant.__name__}: seed {seed}: {violation}")
                return
    pytest.fail(f"{invariant} did not notice {mutant.__name__} in {SEEDS} schedules")


def test_each_invariant_notices_something() -> None:
    assert {invariant for _, invariant in MUTANTS} >= {f"I{number}" for number in (*range(1, 9), 10, 11)}
