"""What each message of the trainer leads to. Repeating any of them is harmless: by its content, or by `request`.

A reference to something that has ended is answered Accepted: the verdict is moot, not wrong. A reference to something
that never was is Refused with one sentence.

Refuses to hold: what a batch contains (see `packing`). Read next: `packing`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any, Final

from polyrl.ledger.batching.discards import discard_group
from polyrl.ledger.batching.filters import passes
from polyrl.ledger.batching.packing import answer_again, digest_of
from polyrl.ledger.decision import Decision
from polyrl.ledger.events import (
    BatchAcknowledged,
    GroupCompleted,
    GroupSubmitted,
    NextAsked,
    NextClosed,
    Reported,
    RequestDone,
    RunFinished,
    SampleScored,
    StepEnded,
    TrainerHeard,
    TurnExtended,
    VersionPublished,
    WindowSet,
)
from polyrl.ledger.messages.greeting import greet_trainer
from polyrl.ledger.messages.group_numbers import was_seen
from polyrl.ledger.messages.submission import submission_fault
from polyrl.ledger.scheduling.leases import announce, drain_engine
from polyrl.ledger.scheduling.moves import already_over, end_turn
from polyrl.ledger.scheduling.reserved import slowest_pace
from polyrl.ledger.state import Phase, SampleState
from polyrl.sample import DiscardReason, Purpose, group_digest, sample_id, split_sample_id
from polyrl.wire import (
    Accepted,
    Acknowledge,
    EndStep,
    Extend,
    Fenced,
    Finish,
    FromTrainer,
    Next,
    PublishVersion,
    Refused,
    Reject,
    Report,
    ReservedWindow,
    Score,
    Submit,
    TrainerBeat,
    TrainerHello,
)

Verdict = str | None
"""None: accepted. Else the sentence of a Refused."""


def hear_trainer(d: Decision, message: FromTrainer) -> None:
    """Decides one message of the trainer."""
    if isinstance(message, TrainerHello):
        greet_trainer(d, message)
        return
    if not isfinite(d.state.trainer_at):
        d.ignore("unknownTrainer")
        d.answer(Fenced("greet first"))
        return
    d.record(TrainerHeard(d.now))
    if isinstance(message, TrainerBeat):
        d.answer(TrainerBeat())
    elif isinstance(message, Next):
        _next(d, message)
    else:
        verdict = _HANDLERS[type(message)](d, message)
        d.answer(Accepted(message.request) if verdict is None else Refused(message.request, verdict))


def _submit(d: Decision, message: Submit) -> Verdict:
    if d.state.finished:
        return "the run is over"
    fault = submission_fault(message.groups)
    if fault is not None:
        return fault
    for group in message.groups:
        known = d.state.groups.get(group.id)
        if known is not None and group_digest(known.group) != group_digest(group):
            return f"group {group.id} was submitted before, as another one"
    for group in message.groups:
        if not was_seen(d.state, group.id):
            d.record(GroupSubmitted(group, d.now))
    return None


def _live(d: Decision, name: str) -> tuple[SampleState | None, Verdict]:
    """The sample; or None and, if it never was, why."""
    sample = d.state.samples.get(name)
    if sample is not None:
        return sample, None
    try:
        number, _ = split_sample_id(name)
    except ValueError:
        return None, f"{name[:64]!r} is not the name of a sample"
    if was_seen(d.state, number):
        d.ignore("verdictTooLate")
        return None, None
    return None, f"sample {name[:64]} was never submitted"


def _judged(d: Decision, message: Score | Extend) -> tuple[SampleState | None, Verdict]:
    """The sample if it waits for this very verdict; None if the verdict was given before or is moot."""
    sample, fault = _live(d, message.sample)
    if sample is None:
        return None, fault
    if message.turn < sample.turn or (message.turn == sample.turn and sample.phase in (Phase.SCORED, Phase.PACKED)):
        d.ignore("verdictRepeated")
        return None, None
    if message.turn > sample.turn or sample.phase is not Phase.TURN_DONE:
        return None, f"turn {message.turn} of sample {message.sample} has not ended; it is in turn {sample.turn}"
    return sample, None


def _score(d: Decision, message: Score) -> Verdict:
    if not isfinite(message.reward):
        return f"the reward of sample {message.sample[:64]} is {message.reward}, not a finite number"
    sample, fault = _judged(d, message)
    if sample is None:
        return fault
    d.record(SampleScored(message.sample, message.reward, message.metrics, d.now))
    _complete(d, sample.group)
    return None


def _complete(d: Decision, number: int) -> None:
    """Closes a group whose last sample was scored."""
    entry = d.state.groups[number]
    if entry.scored < entry.group.n:
        return
    rewards = [d.state.samples[sample_id(number, index)].reward for index in range(entry.group.n)]
    if entry.group.purpose is Purpose.EVAL or passes(d.config.group_filter, rewards):
        d.record(GroupCompleted(number, d.now))
    else:
        text = f"rewards from {min(rewards):g} to {max(rewards):g} do not pass {d.config.group_filter}"
        discard_group(d, number, DiscardReason.FILTERED, "", text)


def _extend(d: Decision, message: Extend) -> Verdict:
    if not message.ids or len(message.ids) % 4:
        return f"the extension of sample {message.sample[:64]} must be one or more whole uint32 tokens"
    sample, fault = _judged(d, message)
    if sample is None:
        return fault
    d.record(TurnExtended(message.sample, message.ids, d.now))
    finish = already_over(d, sample)
    if finish is not None:
        end_turn(d, message.sample, finish)
    return None


def _reject(d: Decision, message: Reject) -> Verdict:
    sample, fault = _live(d, message.sample)
    if sample is None:
        return fault
    if sample.phase is Phase.PACKED:
        return f"sample {message.sample} is in batch {d.state.groups[sample.group].batch} already"
    discard_group(d, sample.group, message.reason, message.sample, message.detail)
    return None


def _next(d: Decision, message: Next) -> None:
    if answer_again(d, message):
        return
    if message.request in d.state.pending:
        d.record(NextClosed(message.request))
    if message.max_samples < 1:
        d.answer(Refused(message.request, f"a batch of at most {message.max_samples} samples holds nothing"))
    elif not (isfinite(message.deadline_s) and message.deadline_s >= 0):
        d.answer(Refused(message.request, f"deadline {message.deadline_s} is not a number of seconds"))
    else:
        d.record(NextAsked(message, d.now))


def _acknowledge(d: Decision, message: Acknowledge) -> Verdict:
    if not 0 <= message.batch < d.state.next_batch:
        return f"batch {message.batch} was never packed"
    if message.batch in d.state.batches:
        d.record(BatchAcknowledged(message.batch, d.now))
    return None


def _once(handler: Callable[[Decision, Any], Verdict]) -> Callable[[Decision, Any], Verdict]:
    """For requests that a repetition would do again to a state that has moved on."""

    def handle(d: Decision, message: Any) -> Verdict:
        digest = digest_of(message)
        if d.state.answered.get(message.request) == digest:
            return None
        verdict = handler(d, message)
        if verdict is None:
            d.record(RequestDone(message.request, digest))
        return verdict

    return handle


def _end_step(d: Decision, message: EndStep) -> Verdict:
    for number, entry in tuple(d.state.groups.items()):
        group = entry.group
        if (group.step, group.purpose) == (message.step, message.purpose) and entry.batch < 0:
            discard_group(d, number, DiscardReason.SURPLUS, notify=False)
    d.record(StepEnded(message.step, message.purpose, d.now))
    return None


def _publish(d: Decision, message: PublishVersion) -> Verdict:
    version = d.state.version
    if message.version <= version.version:
        if message.version == version.version and message.manifest_hash != version.manifest_hash:
            return f"version {message.version} was published before, with other contents"
        place = (version.endpoint, version.public_key)
        if message.version < version.version or place == (message.endpoint, message.public_key):
            return None
    d.record(VersionPublished(message.version, message.endpoint, message.public_key, message.manifest_hash, d.now))
    for name in d.state.engines:
        announce(d, name)
    return None


def _window(d: Decision, message: ReservedWindow) -> Verdict:
    if message.open != d.state.window_open:
        d.record(WindowSet(message.open, d.now, *slowest_pace(d.state)))
    return None


def _report(d: Decision, message: Report) -> Verdict:
    d.record(Reported(message.phase, message.step, message.values, d.now))
    return None


def _finish(d: Decision, message: Finish) -> Verdict:
    if d.state.finished:
        return None
    for number in tuple(d.state.groups):
        discard_group(d, number, DiscardReason.CANCELLED, notify=False)
    d.record(RunFinished(message.ok, message.message, d.now))
    for name in d.state.engines:
        drain_engine(d, name, 0.0, "the run is over")
    return None


_HANDLERS: Final[dict[type, Callable[[Decision, Any], Verdict]]] = {
    Submit: _submit,
    Score: _score,
    Extend: _extend,
    Reject: _reject,
    Acknowledge: _acknowledge,
    EndStep: _once(_end_step),
    PublishVersion: _publish,
    ReservedWindow: _once(_window),
    Report: _once(_report),
    Finish: _finish,
}
