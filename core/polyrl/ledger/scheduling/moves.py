"""How an assignment ends: its sample moves with all its tokens, or its turn is over.

A sample that moves keeps its identity, its tokens and what is left of its budget; the next engine gets prompt + tokens
so far. If nothing is left to generate (the budget is used up, or the last token is a stop token whose finish was lost
with the engine), the turn ends here: an engine that is fed an end-of-sequence token would write past it.
"""

from __future__ import annotations

from polyrl.ledger.batching import discard_group
from polyrl.ledger.events import EngineQuarantined, MoveCause, Moved, QuarantineCause, TurnEnded
from polyrl.ledger.state import SampleState, turn_done
from polyrl.ledger.transition import Transition
from polyrl.sample import DiscardReason, Finish
from polyrl.wire import Cancel


def move(transition: Transition, number: int, cause: MoveCause, *, cancel: bool = True, detail: str = "") -> None:
    """Ends a live assignment unfinished; `cancel`: its engine gets a Cancel."""
    assignment = transition.state.assignments[number]
    if cancel:
        transition.send(assignment.engine, Cancel(number))
    transition.record(Moved(number, cause, at=transition.now))
    sample = transition.state.samples[assignment.sample]
    transition.requeued.append(sample.group)
    if sample.rejections >= transition.config.max_rejections:
        text = f"engines refused it {sample.rejections} times: {detail or 'no reason given'}"
        reason, name = DiscardReason.ENGINE_REJECTED, assignment.sample
        discard_group(transition, sample.group, reason, culprit=name, detail=text)
        return
    finish = already_over(transition, sample)
    if finish is not None:
        end_turn(transition, assignment.sample, finish)


def already_over(transition: Transition, sample: SampleState) -> Finish | None:
    """How the turn has ended although no engine said so; None while there is something to generate."""
    sampling = transition.state.groups[sample.group].group.sampling
    if sample.length > sample.turn_start and sampling.stop_token_ids:
        last = int.from_bytes(sample.ids[-4:], "little")
        if last in sampling.stop_token_ids:
            return Finish.STOP
    return Finish.LENGTH if sample.generated >= sampling.max_new_tokens else None


def end_turn(transition: Transition, name: str, finish: Finish) -> None:
    """Ends a sample's turn and asks the trainer for its verdict."""
    ask_due = transition.now + transition.config.turn_resend_s
    transition.record(TurnEnded(name, finish, ask_due=ask_due, at=transition.now))
    transition.answer(turn_done(transition.state, name))


def quarantine(transition: Transition, name: str, cause: MoveCause, first_pause_s: float | None = None) -> None:
    """An engine failed: no work for a pause that doubles with each failure until it gives tokens again."""
    failures = transition.state.engines[name].failures
    _pause(
        transition,
        name,
        QuarantineCause(cause),
        (first_pause_s or transition.config.suspect_s) * 2.0 ** min(failures, 16),
    )


def half_open(transition: Transition, name: str) -> None:
    """An engine that had gone silent is back: one sample until it gives tokens, and from the second time on a pause
    that doubles, so one that flaps costs ever fewer moves."""
    times, _ = transition.state.vanished[name]
    pause_s = transition.config.suspect_s * 2.0 ** min(times - 2, 16) if times > 1 else 0.0
    _pause(transition, name, QuarantineCause.RETURNED, pause_s)


def _pause(transition: Transition, name: str, cause: QuarantineCause, seconds: float) -> None:
    until = transition.now + min(seconds, transition.config.suspect_max_s)
    transition.record(EngineQuarantined(name, until, cause=cause, at=transition.now))
