"""What each message of the trainer leads to. Repeating any of them is harmless: by its content, or by `request`.

A reference to something that has ended is answered Accepted: the verdict is moot, not wrong. A reference to something
that never was is Declined with one sentence.

Refuses to hold: what a batch contains (see `packing`). Read next: `packing`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any, Final

from polyrl.ledger.batching.discards import discard_group
from polyrl.ledger.batching.filters import passes
from polyrl.ledger.batching.packing import answer_again, digest_of
from polyrl.ledger.events import (
    BatchAcknowledged,
    BatchRequestClosed,
    BatchRequested,
    GroupCompleted,
    GroupSubmitted,
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
from polyrl.ledger.state import SamplePhase, SampleState
from polyrl.ledger.transition import Transition
from polyrl.sample import DiscardReason, Purpose, group_digest, sample_id, split_sample_id
from polyrl.wire import (
    Accepted,
    Acknowledge,
    BatchRequest,
    Declined,
    EndStep,
    Extend,
    Fenced,
    FinishRun,
    FromTrainer,
    PublishVersion,
    Reject,
    ReservedWindow,
    Score,
    Submit,
    TrainerHeartbeat,
    TrainerHello,
    TrainerReport,
)

Verdict = str | None
"""None: accepted. Else the sentence of a Declined."""


def handle_trainer(transition: Transition, message: FromTrainer) -> None:
    """Decides one message of the trainer."""
    if isinstance(message, TrainerHello):
        greet_trainer(transition, message)
        return
    if not isfinite(transition.state.trainer_at):
        transition.ignore("unknownTrainer")
        transition.answer(Fenced("greet first"))
        return
    transition.record(TrainerHeard(transition.now))
    if isinstance(message, TrainerHeartbeat):
        transition.answer(TrainerHeartbeat())
    elif isinstance(message, BatchRequest):
        _next(transition, message)
    else:
        verdict = _HANDLERS[type(message)](transition, message)
        transition.answer(Accepted(message.request) if verdict is None else Declined(message.request, verdict))


def _submit(transition: Transition, message: Submit) -> Verdict:
    if transition.state.finished:
        return "the run is over"
    fault = submission_fault(message.groups)
    if fault is not None:
        return fault
    for group in message.groups:
        known = transition.state.groups.get(group.id)
        if known is not None and group_digest(known.group) != group_digest(group):
            return f"group {group.id} was submitted before, as another one"
    for group in message.groups:
        if not was_seen(transition.state, group.id):
            transition.record(GroupSubmitted(group, transition.now))
    return None


def _live(transition: Transition, name: str) -> tuple[SampleState | None, Verdict]:
    """The sample; or None and, if it never was, why."""
    sample = transition.state.samples.get(name)
    if sample is not None:
        return sample, None
    try:
        number, _ = split_sample_id(name)
    except ValueError:
        return None, f"{name[:64]!r} is not the name of a sample"
    if was_seen(transition.state, number):
        transition.ignore("verdictTooLate")
        return None, None
    return None, f"sample {name[:64]} was never submitted"


def _judged(transition: Transition, message: Score | Extend) -> tuple[SampleState | None, Verdict]:
    """The sample if it waits for this very verdict; None if the verdict was given before or is moot."""
    sample, fault = _live(transition, message.sample)
    if sample is None:
        return None, fault
    if message.turn < sample.turn or (
        message.turn == sample.turn and sample.phase in (SamplePhase.SCORED, SamplePhase.PACKED)
    ):
        transition.ignore("verdictRepeated")
        return None, None
    if message.turn > sample.turn or sample.phase is not SamplePhase.TURN_DONE:
        return None, f"turn {message.turn} of sample {message.sample} has not ended; it is in turn {sample.turn}"
    return sample, None


def _score(transition: Transition, message: Score) -> Verdict:
    if not isfinite(message.reward):
        return f"the reward of sample {message.sample[:64]} is {message.reward}, not a finite number"
    sample, fault = _judged(transition, message)
    if sample is None:
        return fault
    transition.record(SampleScored(message.sample, message.reward, message.metrics, transition.now))
    _complete(transition, sample.group)
    return None


def _complete(transition: Transition, number: int) -> None:
    """Closes a group whose last sample was scored."""
    entry = transition.state.groups[number]
    if entry.scored < entry.group.n:
        return
    rewards = [transition.state.samples[sample_id(number, index)].reward for index in range(entry.group.n)]
    if entry.group.purpose is Purpose.EVAL or passes(transition.config.group_filter, rewards):
        transition.record(GroupCompleted(number, transition.now))
    else:
        text = f"rewards from {min(rewards):g} to {max(rewards):g} do not pass {transition.config.group_filter}"
        discard_group(transition, number, DiscardReason.FILTERED, "", text)


def _extend(transition: Transition, message: Extend) -> Verdict:
    if not message.ids or len(message.ids) % 4:
        return f"the extension of sample {message.sample[:64]} must be one or more whole uint32 tokens"
    sample, fault = _judged(transition, message)
    if sample is None:
        return fault
    transition.record(TurnExtended(message.sample, message.ids, transition.now))
    finish = already_over(transition, sample)
    if finish is not None:
        end_turn(transition, message.sample, finish)
    return None


def _reject(transition: Transition, message: Reject) -> Verdict:
    sample, fault = _live(transition, message.sample)
    if sample is None:
        return fault
    if sample.phase is SamplePhase.PACKED:
        return f"sample {message.sample} is in batch {transition.state.groups[sample.group].batch} already"
    discard_group(transition, sample.group, message.reason, message.sample, message.detail)
    return None


def _next(transition: Transition, message: BatchRequest) -> None:
    if answer_again(transition, message):
        return
    if message.request in transition.state.pending:
        transition.record(BatchRequestClosed(message.request))
    if message.max_samples < 1:
        transition.answer(Declined(message.request, f"a batch of at most {message.max_samples} samples holds nothing"))
    elif not (isfinite(message.deadline_s) and message.deadline_s >= 0):
        transition.answer(Declined(message.request, f"deadline {message.deadline_s} is not a number of seconds"))
    else:
        transition.record(BatchRequested(message, transition.now))


def _acknowledge(transition: Transition, message: Acknowledge) -> Verdict:
    if not 0 <= message.batch < transition.state.next_batch:
        return f"batch {message.batch} was never packed"
    if message.batch in transition.state.batches:
        transition.record(BatchAcknowledged(message.batch, transition.now))
    return None


def _once(handler: Callable[[Transition, Any], Verdict]) -> Callable[[Transition, Any], Verdict]:
    """For requests that a repetition would do again to a state that has moved on."""

    def handle(transition: Transition, message: Any) -> Verdict:
        digest = digest_of(message)
        if transition.state.answered.get(message.request) == digest:
            return None
        verdict = handler(transition, message)
        if verdict is None:
            transition.record(RequestDone(message.request, digest))
        return verdict

    return handle


def _end_step(transition: Transition, message: EndStep) -> Verdict:
    for number, entry in tuple(transition.state.groups.items()):
        group = entry.group
        if (group.step, group.purpose) == (message.step, message.purpose) and entry.batch < 0:
            discard_group(transition, number, DiscardReason.SURPLUS, notify=False)
    transition.record(StepEnded(message.step, message.purpose, transition.now))
    return None


def _publish(transition: Transition, message: PublishVersion) -> Verdict:
    version = transition.state.version
    if message.version <= version.version:
        if message.version == version.version and message.manifest_hash != version.manifest_hash:
            return f"version {message.version} was published before, with other contents"
        place = (version.endpoint, version.public_key)
        if message.version < version.version or place == (message.endpoint, message.public_key):
            return None
    transition.record(
        VersionPublished(message.version, message.endpoint, message.public_key, message.manifest_hash, transition.now)
    )
    for name in transition.state.engines:
        announce(transition, name)
    return None


def _window(transition: Transition, message: ReservedWindow) -> Verdict:
    if message.open != transition.state.window_open:
        transition.record(WindowSet(message.open, transition.now, *slowest_pace(transition.state)))
    return None


def _report(transition: Transition, message: TrainerReport) -> Verdict:
    transition.record(Reported(message.phase, message.step, message.values, transition.now))
    return None


def _finish(transition: Transition, message: FinishRun) -> Verdict:
    if transition.state.finished:
        return None
    for number in tuple(transition.state.groups):
        discard_group(transition, number, DiscardReason.CANCELLED, notify=False)
    transition.record(RunFinished(message.ok, message.message, transition.now))
    for name in transition.state.engines:
        drain_engine(transition, name, 0.0, "the run is over")
    return None


_HANDLERS: Final[dict[type, Callable[[Transition, Any], Verdict]]] = {
    Submit: _submit,
    Score: _score,
    Extend: _extend,
    Reject: _reject,
    Acknowledge: _acknowledge,
    EndStep: _once(_end_step),
    PublishVersion: _publish,
    ReservedWindow: _once(_window),
    TrainerReport: _once(_report),
    FinishRun: _finish,
}
