"""What a manager holds and sends, beyond what tokens take."""

from __future__ import annotations

from typing import Any, Final

from ledger_mutants.mutant import Mutant, Patch, after

from polyrl.ledger import apply, events as f
from polyrl.ledger.apply import samples
from polyrl.ledger.messages import agents, trainer
from polyrl.ledger.state import OpenSpan, assign_message, turn_done
from polyrl.sample import sample_id
from polyrl.wire import Resend


def texts_sent_without_limit(patch: Patch) -> None:
    """Who lacks a text gets it each time that it says so."""

    def send(transition: Any, engine: Any, number: int) -> None:
        assignment = transition.state.assignments.get(number)
        if assignment is not None and assignment.engine == engine.name:
            transition.send(engine.name, assign_message(transition.state, number, kept=False))

    patch.setattr(agents, "_send_text", send)


def greetings_bring_texts(patch: Patch) -> None:
    """An engine that greets gets all that it runs once more."""

    def greet(transition: Any, name: str, hello: Any) -> None:
        honest(transition, name, hello)
        engine = transition.state.engines.get(name)
        for number in engine.running if engine else ():
            transition.send(name, assign_message(transition.state, number, kept=False))

    honest = agents._greet
    patch.setattr(agents, "_greet", greet)


def greetings_ask_for_all(patch: Patch) -> None:
    """An engine that greets sends its turns again from their start."""

    def reconcile(transition: Any, engine: Any, hello: Any) -> None:
        honest(transition, engine, hello)
        for number in engine.running:
            sample = transition.state.samples[transition.state.assignments[number].sample]
            transition.send(engine.name, Resend(number, sample.turn_start))

    honest = agents._reconcile_held
    patch.setattr(agents, "_reconcile_held", reconcile)


def turns_repeated_whole(patch: Patch) -> None:
    """A trainer that greets gets the texts of all turns whose verdict is open, not their names."""

    def send(transition: Any) -> None:
        honest(transition)
        for name in transition.state.awaiting_verdict:
            transition.answer(turn_done(transition.state, name, whole=True))

    honest = trainer._send_again
    patch.setattr(trainer, "_send_again", send)


def ended_texts_kept(patch: Patch) -> None:
    def forget(state: Any, group: Any) -> None:
        texts = [bytes(state.samples[sample_id(group.id, index)].ids) for index in range(group.n)]
        honest(state, group)
        state.ended[group.id] += b"".join(texts) * 2

    honest = samples._forget_group
    patch.setattr(samples, "_forget_group", forget)


def span_for_each_frame(patch: Patch) -> None:
    def taken(state: Any, event: f.TokensTaken) -> None:
        for sample in state.samples.values():
            if sample.spans and sample.spans[-1].end - sample.spans[-1].start > 1:
                last = sample.spans.pop()
                cut = last.end - 1
                for start, end in ((last.start, cut), (cut, last.end)):
                    sample.spans.append(OpenSpan(start, end, last.version, last.engine, last.attempt))

    after(patch, f.TokensTaken, taken)


def greetings_remembered(patch: Patch) -> None:
    def greeted(state: Any, event: f.EngineGreetedAgain) -> None:
        state.vanished[f"{event.engine} at {event.at}"] = (1, event.at)

    after(patch, f.EngineGreetedAgain, greeted)


def gaps_kept(patch: Patch) -> None:
    """A gap that was filled still counts: no frame of its engine is called safe any more."""

    def taken(state: Any, event: f.TokensTaken) -> None:
        gaps = dict(state.engines[event.engine].gaps)
        honest(state, event)
        state.engines[event.engine].gaps.update(gaps)

    honest = apply._APPLY[f.TokensTaken]
    patch.setitem(apply._APPLY, f.TokensTaken, taken)


def backlog_never_falls(patch: Patch) -> None:
    """What was trained stays in the backlog: in the end no later step begins any more."""

    def acknowledged(state: Any, event: f.BatchAcknowledged) -> None:
        before = state.backlog
        honest(state, event)
        state.backlog = before

    honest = apply._APPLY[f.BatchAcknowledged]
    patch.setitem(apply._APPLY, f.BatchAcknowledged, acknowledged)


MUTANTS: Final = (
    Mutant(texts_sent_without_limit, "I11", 55),
    Mutant(greetings_bring_texts, "I11", 55),
    Mutant(greetings_ask_for_all, "I11", 3),
    Mutant(turns_repeated_whole, "I11", 47),
    Mutant(ended_texts_kept, "I11", 55),
    Mutant(span_for_each_frame, "I11", 55),
    Mutant(greetings_remembered, "I11", 3),
    Mutant(gaps_kept, "I11", 0),
    Mutant(backlog_never_falls, "I11", 3),
)
