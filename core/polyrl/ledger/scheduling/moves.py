"""How an assignment ends: its sample moves with all its tokens, or its turn is over.

A sample that moves keeps its identity, its tokens and what is left of its budget; the next engine gets prompt + tokens
so far. If nothing is left to generate (the budget is used up, or the last token is a stop token whose finish was lost
with the engine), the turn ends here: an engine that is fed an end-of-sequence token would write past it.

Refuses to hold: where it goes next (see `placement`). Read next: `discards`.
"""

from __future__ import annotations

from typing import Final

from polyrl.ledger.batching.discards import discard_group
from polyrl.ledger.decision import Decision
from polyrl.ledger.events import EngineStruck, Moved, TurnEnded
from polyrl.ledger.responses import turn_done
from polyrl.ledger.state import SampleState
from polyrl.sample import DiscardReason, Finish
from polyrl.wire import Cancel

CAUSES: Final = (
    "lost",
    "draining",
    "stalled",
    "engineError",
    "rejected",
    "versionChanged",
    "wrongVersion",
    "wrongTokens",
    "notHeld",
    "window",
    "rebalanced",
    "straggler",
)
"""Why assignments end unfinished: an engine vanished, drains, gives no tokens, failed, refused the sample, changed its
weights; sent tokens of a version it may not use, or other tokens than before; no longer had it when it
greeted again; the reserved window closed; another engine will be faster; its own is far slower than all
others."""


def move(d: Decision, number: int, cause: str, *, cancel: bool = True, detail: str = "") -> None:
    """Ends a live assignment unfinished. `cancel` tells its engine."""
    assignment = d.state.assignments[number]
    if cancel:
        d.tell(assignment.engine, Cancel(number))
    d.record(Moved(number, cause, d.now))
    sample = d.state.samples[assignment.sample]
    d.requeued.append(sample.group)
    if sample.rejections >= d.config.max_rejections:
        text = f"engines refused it {sample.rejections} times: {detail or 'no reason given'}"
        discard_group(d, sample.group, DiscardReason.ENGINE_REJECTED, assignment.sample, text)
        return
    finish = already_over(d, sample)
    if finish is not None:
        end_turn(d, assignment.sample, finish)


def already_over(d: Decision, sample: SampleState) -> Finish | None:
    """How the turn has ended although no engine said so; None while there is something to generate."""
    sampling = d.state.groups[sample.group].group.sampling
    if sample.length > sample.turn_start and sampling.stop_token_ids:
        last = int.from_bytes(sample.ids[-4:], "little")
        if last in sampling.stop_token_ids:
            return Finish.STOP
    return Finish.LENGTH if sample.generated >= sampling.max_new_tokens else None


def end_turn(d: Decision, name: str, finish: Finish) -> None:
    """Ends a sample's turn and asks the trainer for its verdict."""
    d.record(TurnEnded(name, finish, d.now + d.config.turn_resend_s, d.now))
    d.answer(turn_done(d.state, name))


def strike(d: Decision, name: str, cause: str, first_pause_s: float | None = None) -> None:
    """An engine failed: no work for a pause that doubles with each failure until it gives tokens again."""
    engine = d.state.engines[name]
    pause = (first_pause_s or d.config.suspect_s) * 2.0 ** min(engine.strikes, 16)
    d.record(EngineStruck(name, d.now + min(pause, d.config.suspect_max_s), cause, d.now))


def put_on_probation(d: Decision, name: str) -> None:
    """An engine that had gone silent is back: one sample until it gives tokens, and from the second time on a pause
    that doubles, so one that flaps costs ever fewer moves."""
    times, _ = d.state.vanished[name]
    pause = d.config.suspect_s * 2.0 ** min(times - 2, 16) if times > 1 else 0.0
    d.record(EngineStruck(name, d.now + min(pause, d.config.suspect_max_s), "returned", d.now))
