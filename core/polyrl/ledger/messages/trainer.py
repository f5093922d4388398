"""What each message of the trainer leads to. Repeating any of them is harmless: by its content, or by `request`.

A reference to something that has ended is answered Accepted: the verdict is moot, not wrong. A reference to something
that never was is Declined with one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, Final

from polyrl import wire
from polyrl.ledger import events
from polyrl.ledger.batching.discards import discard_group, passes
from polyrl.ledger.batching.packing import answer_again, digest_of
from polyrl.ledger.messages.greeting import greet_trainer
from polyrl.ledger.scheduling.leases import announce, drain_engine
from polyrl.ledger.scheduling.moves import already_over, end_turn
from polyrl.ledger.scheduling.reserved import slowest_pace
from polyrl.ledger.state import SamplePhase, SampleState
from polyrl.ledger.transition import Transition
from polyrl.sample import DiscardReason, Group, Purpose, group_digest, sample_id, split_sample_id

MAX_SAMPLES: Final = 4096
"""Samples of one group; four times what the manifest allows."""

Verdict = str | None
"""None: accepted. Else the sentence of a Declined."""


def handle_trainer(transition: Transition, message: wire.FromTrainer) -> None:
    """Decides one message of the trainer."""
    if isinstance(message, wire.TrainerHello):
        greet_trainer(transition, message)
        return
    if not isfinite(transition.state.trainer_at):
        transition.ignore("unknownTrainer")
        transition.answer(wire.Fenced("greet first"))
        return
    transition.record(events.TrainerHeard(transition.now))
    if isinstance(message, wire.TrainerHeartbeat):
        transition.answer(wire.TrainerHeartbeat())
    elif isinstance(message, wire.BatchRequest):
        _next(transition, message)
    else:
        verdict = _HANDLERS[type(message)](transition, message)
        answer = wire.Accepted(message.request) if verdict is None else wire.Declined(message.request, verdict)
        transition.answer(answer)


def _submit(transition: Transition, message: wire.Submit) -> Verdict:
    state = transition.state
    if state.finished:
        return "the run is over"
    fault = _submission_fault(message.groups)
    if fault is not None:
        return fault
    for group in message.groups:
        known = state.groups.get(group.id)
        if known is not None and group_digest(known.group) != group_digest(group):
            return f"group {group.id} was submitted before, as another one"
    for group in message.groups:
        if not state.was_submitted(group.id):
            transition.record(events.GroupSubmitted(group, transition.now))
    return None


def _submission_fault(groups: Sequence[Group]) -> Verdict:
    faults = ((group.id, _group_fault(group)) for group in groups)
    return next((f"group {number}: {fault}" for number, fault in faults if fault is not None), None)


def _group_fault(group: Group) -> Verdict:
    """What makes a group impossible; no later rule checks it again."""
    if group.id < 0:
        return "its number must not be negative"
    if not 1 <= group.n <= MAX_SAMPLES:
        return f"n is {group.n}, not in 1 .. {MAX_SAMPLES}"
    if not group.prompt_ids or len(group.prompt_ids) % 4:
        return "the prompt must be one or more whole uint32 tokens"
    if group.sampling.max_new_tokens < 1:
        return f"max_new_tokens is {group.sampling.max_new_tokens}, less than 1"
    if not 0 <= group.min_version <= group.max_version:
        return f"versions {group.min_version} to {group.max_version} are no range of published versions"
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
    if transition.state.was_submitted(number):
        transition.ignore("verdictTooLate")
        return None, None
    return None, f"sample {name[:64]} was never submitted"


def _awaiting(transition: Transition, message: wire.Score | wire.Extend) -> tuple[SampleState | None, Verdict]:
    """The sample if it waits for this very verdict; None if the verdict was given before or is moot."""
    sample, fault = _live(transition, message.sample)
    if sample is None:
        return None, fault
    has_verdict = sample.phase in (SamplePhase.SCORED, SamplePhase.PACKED)
    if message.turn < sample.turn or (message.turn == sample.turn and has_verdict):
        transition.ignore("verdictRepeated")
        return None, None
    if message.turn > sample.turn or sample.phase is not SamplePhase.TURN_DONE:
        return None, f"turn {message.turn} of sample {message.sample} has not ended; it is in turn {sample.turn}"
    return sample, None


def _score(transition: Transition, message: wire.Score) -> Verdict:
    if not isfinite(message.reward):
        return f"the reward of sample {message.sample[:64]} is {message.reward}, not a finite number"
    sample, fault = _awaiting(transition, message)
    if sample is None:
        return fault
    transition.record(events.SampleScored(message.sample, message.reward, metrics=message.metrics, at=transition.now))
    _complete(transition, sample.group)
    return None


def _complete(transition: Transition, number: int) -> None:
    """Closes a group whose last sample was scored."""
    state, group_filter = transition.state, transition.config.group_filter
    entry = state.groups[number]
    if entry.scored < entry.group.n:
        return
    rewards = [state.samples[sample_id(number, index)].reward for index in range(entry.group.n)]
    if entry.group.purpose is Purpose.EVAL or passes(group_filter, rewards):
        transition.record(events.GroupCompleted(number, transition.now))
    else:
        text = f"rewards from {min(rewards):g} to {max(rewards):g} do not pass {group_filter}"
        discard_group(transition, number, DiscardReason.FILTERED, detail=text)


def _extend(transition: Transition, message: wire.Extend) -> Verdict:
    if not message.ids or len(message.ids) % 4:
        return f"the extension of sample {message.sample[:64]} must be one or more whole uint32 tokens"
    sample, fault = _awaiting(transition, message)
    if sample is None:
        return fault
    transition.record(events.TurnExtended(message.sample, message.ids, transition.now))
    finish = already_over(transition, sample)
    if finish is not None:
        end_turn(transition, message.sample, finish)
    return None


def _reject(transition: Transition, message: wire.Reject) -> Verdict:
    sample, fault = _live(transition, message.sample)
    if sample is None:
        return fault
    if sample.phase is SamplePhase.PACKED:
        return f"sample {message.sample} is in batch {transition.state.groups[sample.group].batch} already"
    discard_group(transition, sample.group, message.reason, culprit=message.sample, detail=message.detail)
    return None


def _next(transition: Transition, message: wire.BatchRequest) -> None:
    if answer_again(transition, message):
        return
    if message.request in transition.state.pending:
        transition.record(events.BatchRequestClosed(message.request))
    if message.max_samples < 1:
        text = f"a batch of at most {message.max_samples} samples holds nothing"
        transition.answer(wire.Declined(message.request, text))
    elif not (isfinite(message.deadline_s) and message.deadline_s >= 0):
        text = f"deadline {message.deadline_s} is not a number of seconds"
        transition.answer(wire.Declined(message.request, text))
    else:
        transition.record(events.BatchRequested(message, transition.now))


def _acknowledge(transition: Transition, message: wire.Acknowledge) -> Verdict:
    if not 0 <= message.batch < transition.state.next_batch:
        return f"batch {message.batch} was never packed"
    if message.batch in transition.state.batches:
        transition.record(events.BatchAcknowledged(message.batch, transition.now))
    return None


def _once(handler: Callable[[Transition, Any], Verdict]) -> Callable[[Transition, Any], Verdict]:
    """For requests that a repetition would do again to a state that has moved on."""

    def handle(transition: Transition, message: Any) -> Verdict:
        digest = digest_of(message)
        if transition.state.answered.get(message.request) == digest:
            return None
        verdict = handler(transition, message)
        if verdict is None:
            transition.record(events.RequestDone(message.request, digest))
        return verdict

    return handle


def _end_step(transition: Transition, message: wire.EndStep) -> Verdict:
    for number, entry in tuple(transition.state.groups.items()):
        group = entry.group
        if (group.step, group.purpose) == (message.step, message.purpose) and entry.batch < 0:
            discard_group(transition, number, DiscardReason.SURPLUS, notify=False)
    transition.record(events.StepEnded(message.step, message.purpose, transition.now))
    return None


def _publish(transition: Transition, message: wire.PublishVersion) -> Verdict:
    newest, published = transition.state.weights, message.weights
    if published.version == newest.version and published.manifest_hash != newest.manifest_hash:
        return f"version {published.version} was published before, with other contents"
    if published.version < newest.version or published == newest:
        return None
    transition.record(events.VersionPublished(published, transition.now))
    for name in transition.state.engines:
        announce(transition, name)
    return None


def _window(transition: Transition, message: wire.ReservedWindow) -> Verdict:
    if message.open != transition.state.window_open:
        token_s, read_s = slowest_pace(transition.state)
        transition.record(events.WindowSet(message.open, transition.now, token_s=token_s, read_s=read_s))
    return None


def _report(transition: Transition, message: wire.TrainerReport) -> Verdict:
    transition.record(events.Reported(message.phase, message.step, values=message.values, at=transition.now))
    return None


def _finish(transition: Transition, message: wire.FinishRun) -> Verdict:
    if transition.state.finished:
        return None
    for number in tuple(transition.state.groups):
        discard_group(transition, number, DiscardReason.CANCELLED, notify=False)
    transition.record(events.RunFinished(message.ok, message.message, transition.now))
    for name in transition.state.engines:
        drain_engine(transition, name, deadline_s=0.0, reason="the run is over")
    return None


_HANDLERS: Final[dict[type, Callable[[Transition, Any], Verdict]]] = {
    wire.Submit: _submit,
    wire.Score: _score,
    wire.Extend: _extend,
    wire.Reject: _reject,
    wire.Acknowledge: _acknowledge,
    wire.EndStep: _once(_end_step),
    wire.PublishVersion: _publish,
    wire.ReservedWindow: _once(_window),
    wire.TrainerReport: _once(_report),
    wire.FinishRun: _finish,
}
