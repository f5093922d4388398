"""Samples and groups: their phases, verdicts and ends."""

from __future__ import annotations

from math import inf
from typing import Any, Final

from ledger_mutants.mutant import Mutant, Patch, after, after_move

from polyrl.ledger import batching, events as f
from polyrl.ledger.apply import samples
from polyrl.ledger.causes import MoveCause
from polyrl.ledger.messages import agents, trainer
from polyrl.ledger.scheduling import leases, moves
from polyrl.ledger.state import context_used
from polyrl.sample import DiscardReason, Purpose, sample_id
from polyrl.wire import Accepted


def sample_lost_when_moved(patch: Patch) -> None:
    after_move(patch, samples._unqueue_sample)


def finished_groups_discarded(patch: Patch) -> None:
    """No training group passes the filter, whatever it is."""
    honest = trainer.passes
    patch.setattr(trainer, "passes", lambda name, *given: name != "none" and honest(name, *given))


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


def dropped_in_silence(patch: Patch) -> None:
    def discard(d: Any, number: int, *rest: Any, **_: Any) -> None:
        honest(d, number, *rest, notify=False)

    honest = batching.discard_group
    for module in (moves, trainer, batching):
        patch.setattr(module, "discard_group", discard)


def verdicts_never_asked_again(patch: Patch) -> None:
    patch.setattr(leases, "_ask_again", lambda d: inf)


def evaluation_never_complete(patch: Patch) -> None:
    honest = trainer._complete

    def complete(d: Any, number: int) -> None:
        if d.state.groups[number].group.purpose is not Purpose.EVAL:
            honest(d, number)

    patch.setattr(trainer, "_complete", complete)


def groups_pass_every_filter(patch: Patch) -> None:
    patch.setattr(trainer, "passes", lambda name, *given: True)


def evaluation_is_filtered(patch: Patch) -> None:
    """Evaluation groups must pass the filter like training ones."""

    def complete(transition: Any, number: int) -> None:
        entry = transition.state.groups[number]
        rewards = [transition.state.samples[sample_id(number, index)].reward for index in range(entry.group.n)]
        if entry.scored == entry.group.n and entry.group.purpose is Purpose.EVAL and not any(rewards):
            batching.discard_group(transition, number, DiscardReason.FILTERED)
        else:
            honest(transition, number)

    honest = trainer._complete
    patch.setattr(trainer, "_complete", complete)


def turn_not_counted(patch: Patch) -> None:
    def extend(state: Any, event: f.TurnExtended) -> None:
        state.samples[event.sample].turn -= 1

    after(patch, f.TurnExtended, extend)


def packed_groups_rejected(patch: Patch) -> None:
    """A verdict that comes again takes its group out of a batch."""

    def end_step(transition: Any, message: Any) -> None:
        for number, entry in tuple(transition.state.groups.items()):
            if (entry.group.step, entry.group.purpose) == (message.step, message.purpose):
                batching.discard_group(transition, number, DiscardReason.SURPLUS, notify=False)
        transition.record(f.StepEnded(message.step, message.purpose, at=transition.now))
        transition.answer(Accepted(message.request))

    patch.setattr(trainer, "_end_step", end_step)


def refusals_forgotten(patch: Patch) -> None:
    """Nobody remembers who refused a sample."""

    def moved(state: Any, event: f.Moved) -> None:
        if event.cause is MoveCause.REJECTED:
            for sample in state.samples.values():
                sample.rejections, sample.refused_at = 0, inf
                sample.rejected_by.clear()

    after(patch, f.Moved, moved)


def one_engine_is_believed(patch: Patch) -> None:
    """Three refusals are enough, also of one engine."""
    patch.setattr(moves, "_is_refused", lambda _, sample: sample.rejections >= 3)


def sibling_left_waiting(patch: Patch) -> None:
    """The first sample of a group comes back into the queue and is not found there."""

    def moved(state: Any, event: f.Moved) -> None:
        for entry in state.groups.values():
            if entry.waiting and entry.waiting[0] == 0 and len(entry.waiting) > 1:
                entry.waiting.remove(0)

    after(patch, f.Moved, moved)


def outgrown_discarded(patch: Patch) -> None:
    """What fills the longest context is discarded, and not ended."""

    def end(transition: Any, entry: Any, context: int) -> None:
        names = [sample_id(entry.group.id, index) for index in entry.waiting]
        if any(context_used(transition.state, transition.state.samples[name]) >= context for name in names):
            batching.discard_group(transition, entry.group.id, DiscardReason.PROMPT_TOO_LONG)

    patch.setattr(moves, "_end_outgrown", end)


def awaited_verdicts_forgotten(patch: Patch) -> None:
    """A trainer that comes back does not learn which verdicts are open, nor does the ledger ask again."""
    patch.setattr(trainer, "_send_again", lambda transition: None)
    patch.setattr(leases, "_ask_again", lambda transition: inf)


def verdict_deadline_at_once(patch: Patch) -> None:
    """Whoever is asked twice has given no verdict."""

    def ask(transition: Any) -> Any:
        for name in tuple(transition.state.awaiting_verdict):
            sample = transition.state.samples.get(name)
            if sample is not None and sample.asks > 1:
                batching.discard_group(transition, sample.group, DiscardReason.REWARD_TIMED_OUT, culprit=name)
        return honest(transition)

    honest = leases._ask_again
    patch.setattr(leases, "_ask_again", ask)


MUTANTS: Final = (
    Mutant(sample_lost_when_moved, "I5", 14),
    Mutant(finished_groups_discarded, "I1", 7),
    Mutant(lost_engines_groups_discarded, "I1", 8),
    Mutant(surplus_ended_early, "I1", 3),
    Mutant(first_rejection_believed, "I1", 28),
    Mutant(stale_too_early, "I1", 1),
    Mutant(dropped_in_silence, "I5", 6),
    Mutant(verdicts_never_asked_again, "I5", 6),
    Mutant(evaluation_never_complete, "I5", 16),
    Mutant(groups_pass_every_filter, "I2", 6),
    Mutant(evaluation_is_filtered, "I1", 8),
    Mutant(turn_not_counted, "I5", 4),
    Mutant(packed_groups_rejected, "I1", 0),
    Mutant(refusals_forgotten, "I5", 34),
    Mutant(one_engine_is_believed, "I1", 1505),
    Mutant(sibling_left_waiting, "I5", 32),
    Mutant(outgrown_discarded, "I1", 174),
    Mutant(awaited_verdicts_forgotten, "I5", 23),
    Mutant(verdict_deadline_at_once, "I1", 6),
)
