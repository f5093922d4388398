"""What agents send, and what becomes of it."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from ledger_mutants.mutant import Mutant, Patch, after, after_move

from polyrl.ledger import apply, events as f
from polyrl.ledger.apply import engines
from polyrl.ledger.messages import agents, deltas, trainer
from polyrl.ledger.scheduling import moves
from polyrl.sample import Finish
from polyrl.wire import Resend, pack_rows


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


def tokens_lost_when_moved(patch: Patch) -> None:
    def moved(state: Any, sample: Any) -> None:
        del sample.ids[-4:]

    after_move(patch, moved)


def budget_forgotten_when_moved(patch: Patch) -> None:
    def moved(state: Any, sample: Any) -> None:
        sample.generated = 0

    after_move(patch, moved)


def stop_token_fed_back(patch: Patch) -> None:
    """A sample whose last token is a stop token is generated on."""

    def over(d: Any, sample: Any) -> Finish | None:
        budget = d.state.groups[sample.group].group.sampling.max_new_tokens
        return Finish.LENGTH if sample.generated >= budget else None

    for module in (moves, trainer, deltas):
        patch.setattr(module, "already_over", over)


def rows_that_bring_nothing(patch: Patch) -> None:
    """A frame grows by 335 empty rows per token: 4,032 bytes each."""
    original = deltas.take_deltas

    def take(d: Any, engine: Any, message: Any) -> None:
        rows = len(message.ids) // 4 * 335
        original(d, engine, msgspec.structs.replace(message, rows=message.rows + pack_rows([(0, 0, 0, 0)] * rows)))

    patch.setattr(agents, "take_deltas", take)


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


def limit_one_too_far(patch: Patch) -> None:
    """An engine may send one token more than it was allowed."""

    def allow(state: Any, event: f.Assigned) -> None:
        state.assignments[event.assignment].limit += 1

    after(patch, f.Assigned, allow)


def budget_one_short(patch: Patch) -> None:
    """The last token that the budget allows is not waited for."""

    def over(transition: Any, sample: Any) -> Finish | None:
        budget = transition.state.groups[sample.group].group.sampling.max_new_tokens
        return Finish.LENGTH if sample.generated == budget - 1 else honest(transition, sample)

    honest = moves.already_over
    for module in (moves, trainer, deltas):
        patch.setattr(module, "already_over", over)


def repeated_tokens_uncounted(patch: Patch) -> None:
    honest = deltas._Sift.accepted
    patch.setattr(
        deltas._Sift, "accepted", lambda sift, taken: msgspec.structs.replace(honest(sift, taken), repeated=0)
    )


def early_end_believed(patch: Patch) -> None:
    """`length` before the limit is an end like any other."""

    def end(transition: Any, number: int, finish: int) -> None:
        assignment = transition.state.assignments[number]
        if finish and assignment.length < assignment.limit:
            moves.end_turn(transition, assignment.sample, Finish.LENGTH)
        else:
            honest(transition, number, finish)

    honest = deltas._end
    patch.setattr(deltas, "_end", end)


def environment_counts_as_generated(patch: Patch) -> None:
    def extend(state: Any, event: f.TurnExtended) -> None:
        state.samples[event.sample].generated += len(event.ids) // 4

    after(patch, f.TurnExtended, extend)


def attempt_not_counted(patch: Patch) -> None:
    """Two engines' tokens lie in one span."""

    def assigned(state: Any, event: f.Assigned) -> None:
        sample = state.samples[event.sample]
        sample.attempt = max(1, sample.attempt - 1)

    after(patch, f.Assigned, assigned)


def version_of_the_engine_kept(patch: Patch) -> None:
    """Tokens count as of what their engine serves when they arrive, not of what their frame says."""

    def taken(state: Any, event: f.TokensTaken) -> None:
        version = state.engines[event.engine].version
        honest(state, msgspec.structs.replace(event, version=version) if version >= 0 else event)

    honest = apply._APPLY[f.TokensTaken]
    patch.setitem(apply._APPLY, f.TokensTaken, taken)


def frame_gaps_unnoticed(patch: Patch) -> None:
    """A frame is called safe, and with it the one before that never came."""

    def take(transition: Any, engine: Any, message: Any) -> None:
        engine.seq = -1
        honest(transition, engine, message)

    honest = deltas.take_deltas
    patch.setattr(agents, "take_deltas", take)


def reclaim_keeps_newer_tokens(patch: Patch) -> None:
    """What another engine made since stays, and the returning one is to go on behind it."""

    def reclaimed(state: Any, event: f.Reclaimed) -> None:
        length = max(event.length, state.samples[event.sample].length)
        honest(state, msgspec.structs.replace(event, length=length))

    honest = apply._APPLY[f.Reclaimed]
    patch.setitem(apply._APPLY, f.Reclaimed, reclaimed)


MUTANTS: Final = (
    Mutant(version_of_the_engine_kept, "I6", 0),
    Mutant(frame_gaps_unnoticed, "I10", 75),
    Mutant(reclaim_keeps_newer_tokens, "I11", 74),
    Mutant(no_overlap_trimming, "I4", 20),
    Mutant(gap_ignored, "I4", 20),
    Mutant(foreign_version_taken, "I6", 0),
    Mutant(tokens_lost_when_moved, "I4", 0),
    Mutant(budget_forgotten_when_moved, "I4", 16),
    Mutant(stop_token_fed_back, "I4", 4),
    Mutant(rows_that_bring_nothing, "I11", 8),
    Mutant(everything_asked_for_again, "I11", 11),
    Mutant(refused_tokens_uncounted, "I11", 0),
    Mutant(limit_one_too_far, "I4", 1),
    Mutant(budget_one_short, "I4", 4),
    Mutant(repeated_tokens_uncounted, "I11", 5),
    Mutant(early_end_believed, "I4", 8),
    Mutant(environment_counts_as_generated, "I4", 5),
    Mutant(attempt_not_counted, "I4", 12),
)
