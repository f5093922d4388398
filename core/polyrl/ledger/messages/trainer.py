"""What each message of the trainer leads to. Repeating any of them is harmless: by its content, or by `request`.

A reference to something that has ended is answered Accepted: the verdict is moot, not wrong. A reference to something
that never was is Declined with one sentence.

A trainer greets for the first time, after a broken connection, or as another process that has started again:

    the same process     what it missed is sent again; nothing changes
    another process      the one before is fenced for good; what that one asked for is closed, the batches that it did
                         not acknowledge are offered again; a fresh one learns what is held for it
    knows more than we   our journal is lost: the numbers that it knows are taken, so nothing old is mistaken for new

What the newcomer can still use of what is held, it says itself, by Submit and Reject.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any, Final, TypeAlias

from polyrl import wire
from polyrl.ledger import events
from polyrl.ledger.batching import answer_again, digest_of, discard_group, passes
from polyrl.ledger.measures.departures import departures
from polyrl.ledger.scheduling.leases import announce, drain_engine
from polyrl.ledger.scheduling.moves import already_over, end_turn, pause_departed
from polyrl.ledger.state import (
    GroupState,
    LedgerState,
    SamplePhase,
    SampleState,
    context_used,
    response_part,
    step_key,
    turn_done,
)
from polyrl.ledger.transition import Transition
from polyrl.sample import TURN_REWARD, DiscardReason, Group, Purpose, fault_of, group_digest, sample_id, split_sample_id
from polyrl.status import MAX_COUNT
from polyrl.wire.ranges import has_number

FETCH_TOKENS: Final = 1 << 19
"""Answered to one Fetch, and up to a sample more: 4 MiB, some ten milliseconds in which nobody else is served."""

DISCARDED_AT_ONCE: Final = 1024
"""Samples of a step that has ended that are discarded before other inputs get their turn: some 0.02 s."""

MAX_SAMPLES: Final = 4096
"""Samples of one group; four times what the manifest allows."""

_Handler: TypeAlias = Callable[[Transition, Any], None]


class _Refusal(Exception):
    """The message cannot take effect; the sentence of a Declined."""


class _Moot(Exception):
    """The message comes too late or again: it is counted as ignored under this name, and accepted."""


def handle_trainer(transition: Transition, message: wire.FromTrainer) -> None:
    """Decides one message of the trainer."""
    if isinstance(message, wire.TrainerHello):
        _greet(transition, message)
        return
    if not isfinite(transition.state.trainer_at):
        transition.ignore("unknownTrainer")
        transition.answer(wire.Fenced("greet first"))
        return
    transition.record(events.TrainerHeard(transition.now))
    if isinstance(message, wire.TrainerHeartbeat):
        transition.answer(wire.TrainerHeartbeat())
    elif isinstance(message, wire.NoticesTaken):
        _take_notices(transition, message)
    elif isinstance(message, wire.BatchRequest):
        _next(transition, message)
    elif isinstance(message, wire.Fetch):
        _fetch(transition, message)
    elif (done := transition.state.answered.get(message.request)) and done == digest_of(message):
        transition.answer(wire.Accepted(message.request))  # again it would be done to a state that has moved on
    elif isinstance(message, wire.EndStep):
        _end_step(transition, message)
    else:
        transition.answer(_answer(transition, message))


def _answer(transition: Transition, message: Any) -> wire.Accepted | wire.Declined:
    try:
        _HANDLERS[type(message)](transition, message)
    except _Moot as moot:
        transition.ignore(str(moot))
    except _Refusal as refusal:
        return wire.Declined(message.request, str(refusal))
    return wire.Accepted(message.request)


def _greet(transition: Transition, hello: wire.TrainerHello) -> None:
    """Welcome, and all that a trainer may have missed; or Fenced."""
    state, now = transition.state, transition.now
    refusal = _refusal(state, hello)
    if refusal:
        transition.ignore("fencedTrainer")
        transition.answer(wire.Fenced(refusal))
        return
    newcomer = hello.trainer != state.trainer
    transition.record(events.TrainerHeard(now))
    transition.record(events.TrainerGreeted(hello.trainer, now, covers=hello.covers))
    for batch in tuple(state.batches):
        if batch <= hello.acknowledged or has_number(hello.acknowledged_above, batch):
            _end_batch(transition, batch)
    if newcomer:
        transition.fleet.ending.clear()
        _cover(transition, ((0, hello.acknowledged + 1), *hello.acknowledged_above))
        _take_back(transition)
    if hello.next_group > state.next_group or hello.next_batch > state.next_batch:
        transition.record(events.NumbersTaken(hello.next_group, hello.next_batch, assignment=0, at=now))
    transition.answer(_welcome(state, with_held=hello.fresh))
    _send_again(transition)


def _refusal(state: LedgerState, hello: wire.TrainerHello) -> str:
    if hello.run_epoch != state.config.run_epoch:
        return f"this is epoch {state.config.run_epoch}, not {hello.run_epoch}"
    return wire.SUPERSEDED if hello.trainer in state.replaced else ""


def _take_back(transition: Transition) -> None:
    """What went to the trainer before can be asked for again, in the order in which it was packed."""
    for request in tuple(transition.state.pending):
        transition.record(events.BatchRequestClosed(request))
    for batch in sorted((*transition.state.batches, *transition.state.kept), reverse=True):
        transition.record(events.BatchReturned(batch, transition.now))


def _welcome(state: LedgerState, *, with_held: bool) -> wire.TrainerWelcome:
    config = state.config
    return wire.TrainerWelcome(
        config.run_epoch,
        config.lease_s,
        beat_s=config.beat_s,
        journal=config.journal,
        next_group=state.next_group,
        version=state.weights.version,
        manifest_hash=state.weights.manifest_hash,
        content=state.weights.content,
        held=tuple(_held(state, entry) for entry in state.groups.values()) if with_held else (),
    )


def _held(state: LedgerState, entry: GroupState) -> wire.HeldGroup:
    group = entry.group
    return wire.HeldGroup(
        group.id,
        group.step,
        purpose=group.purpose,
        digest=group_digest(group),
        min_version=group.min_version,
        max_version=group.max_version,
        scored=entry.scored,
        turn=max(state.samples[sample_id(group.id, index)].turn for index in range(group.n)),
        complete=entry.ready,
        content=state.contents.get(group.max_version, b""),
    )


def _send_again(transition: Transition) -> None:
    for step in transition.state.steps.values():
        for notice in step.notices:
            transition.answer(notice)
    samples = transition.state.samples
    awaited = tuple((name, samples[name].turn) for name in transition.state.awaiting_verdict)
    if awaited:
        transition.answer(wire.TurnsAwaited(awaited))


def _fetch(transition: Transition, message: wire.Fetch) -> None:
    """Texts of as many samples as one answer may carry, one at least."""
    state, tokens, count = transition.state, 0, 0
    for name in message.samples:
        sample = state.samples.get(name)
        if sample is not None and sample.phase is SamplePhase.TURN_DONE:
            transition.answer(turn_done(state, name, whole=True))
            tokens += sample.length
        elif sample is not None and sample.phase in (SamplePhase.SCORED, SamplePhase.PACKED):
            transition.answer(wire.FetchedText(response_part(name, sample, 0)))
            tokens += sample.length
        count += 1
        if tokens > FETCH_TOKENS:
            break
    transition.answer(wire.Fetched(message.request, count))


def _submit(transition: Transition, message: wire.Submit) -> None:
    state = transition.state
    if state.finished:
        raise _Refusal("the run is over")
    fresh: dict[int, Group] = {}
    for group in message.groups:
        _check_group(group)
        _check_number(state, group)
        if fresh.setdefault(group.id, group) != group:
            raise _Refusal(f"group {group.id} stands twice in one message, as two groups")
    for group in message.groups:
        if not state.was_submitted(group.id):
            transition.record(events.GroupSubmitted(group, transition.now))
            transition.requeued.append(group.id)


def _check_number(state: LedgerState, group: Group) -> None:
    """Refuses a number that was another group's, or may have been: nothing would ever come of such a group."""
    if not state.was_submitted(group.id):
        return
    free = f"numbers from {state.next_group} on are free"
    live = state.groups.get(group.id)
    known = state.ended.get(group.id) if live is None else group_digest(live.group)
    if known is None and group.id >= state.lost_below:
        raise _Refusal(f"group {group.id} has ended long ago; {free}")
    if known is not None and known != group_digest(group):
        raise _Refusal(f"group {group.id} was submitted before, as another one; {free}")


def _check_group(group: Group) -> None:
    """Refuses an impossible group; no later rule checks it again."""
    fault = None
    if group.id < 0:
        fault = "its number must not be negative"
    elif max(group.id, abs(group.step), group.max_version, abs(group.priority)) > MAX_COUNT:
        # In the journal it would end each manager that greets the trainer with the number after it.
        fault = f"number, step, versions and priority must not exceed {MAX_COUNT}"
    elif not 1 <= group.n <= MAX_SAMPLES:
        fault = f"n is {group.n}, not in 1 .. {MAX_SAMPLES}"
    elif not group.prompt_ids or len(group.prompt_ids) % 4:
        fault = "the prompt must be one or more whole uint32 tokens"
    elif group.sampling.max_new_tokens < 1:
        fault = f"max_new_tokens is {group.sampling.max_new_tokens}, less than 1"
    elif (tokens := len(group.prompt_ids) // 4 + group.sampling.max_new_tokens) > wire.MAX_SAMPLE_TOKENS:
        fault = f"prompt and max_new_tokens are {tokens} tokens; no message holds more than {wire.MAX_SAMPLE_TOKENS}"
    elif not 0 <= group.min_version <= group.max_version:
        fault = f"versions {group.min_version} to {group.max_version} are no range of published versions"
    fault = fault or fault_of(group.sampling)
    if fault is not None:
        raise _Refusal(f"group {group.id}: {fault}")


def _live(transition: Transition, name: str) -> SampleState:
    """The sample; moot when it has ended, refused when it never was."""
    sample = transition.state.samples.get(name)
    if sample is not None and sample.phase is not SamplePhase.KEPT:
        return sample
    try:
        number, _ = split_sample_id(name)
    except ValueError:
        raise _Refusal(f"{name[:64]!r} is not the name of a sample") from None
    if transition.state.was_submitted(number):
        raise _Moot("verdictTooLate")
    raise _Refusal(f"sample {name[:64]} was never submitted")


def _awaiting(transition: Transition, message: wire.Score | wire.Extend) -> SampleState:
    """The sample, which waits for this very verdict; moot when the verdict was given before."""
    sample = _live(transition, message.sample)
    has_verdict = sample.phase in (SamplePhase.SCORED, SamplePhase.PACKED)
    if message.turn < sample.turn or (message.turn == sample.turn and has_verdict):
        raise _Moot("verdictRepeated")
    if message.turn > sample.turn or sample.phase is not SamplePhase.TURN_DONE:
        raise _Refusal(f"turn {message.turn} of sample {message.sample} has not ended; it is in turn {sample.turn}")
    return sample


def _score(transition: Transition, message: wire.Score) -> None:
    if not isfinite(message.reward):
        raise _Refusal(f"the reward of sample {message.sample[:64]} is {message.reward}, not a finite number")
    excess = wire.excess_of_metrics(message.metrics)
    if excess:
        raise _Refusal(f"sample {message.sample[:64]}: its metrics {excess}")
    sample = _awaiting(transition, message)
    transition.record(events.SampleScored(message.sample, message.reward, metrics=message.metrics, at=transition.now))
    _complete(transition, sample.group)


def _complete(transition: Transition, number: int) -> None:
    """Closes a group whose last sample was scored."""
    state, group_filter = transition.state, transition.config.group_filter
    entry = state.groups[number]
    if entry.scored < entry.group.n:
        return
    samples = [state.samples[sample_id(number, index)] for index in range(entry.group.n)]
    rewards = [sample.reward for sample in samples]
    of_turns = [
        {name: paid for name, paid in sample.metrics.items() if name.startswith(TURN_REWARD)} for sample in samples
    ]
    if entry.group.purpose is Purpose.EVAL or passes(group_filter, rewards, of_turns):
        transition.record(events.GroupCompleted(number, transition.now))
    else:
        text = f"rewards from {min(rewards):g} to {max(rewards):g} do not pass {group_filter}"
        discard_group(transition, number, DiscardReason.FILTERED, detail=text)


def _extend(transition: Transition, message: wire.Extend) -> None:
    if not message.ids or len(message.ids) % 4:
        raise _Refusal(f"the extension of sample {message.sample[:64]} must be one or more whole uint32 tokens")
    sample = _awaiting(transition, message)
    tokens = context_used(transition.state, sample) + len(message.ids) // 4
    if tokens > wire.MAX_SAMPLE_TOKENS:
        text = f"the extension makes {tokens} tokens of it; no message holds more than {wire.MAX_SAMPLE_TOKENS}"
        raise _Refusal(f"sample {message.sample}: {text}")
    transition.record(events.TurnExtended(message.sample, message.ids, at=transition.now))
    transition.requeued.append(sample.group)
    finish = already_over(transition, sample)
    if finish is not None:
        end_turn(transition, message.sample, finish)


def _reject(transition: Transition, message: wire.Reject) -> None:
    sample = _live(transition, message.sample)
    if sample.phase is SamplePhase.PACKED:
        batch = transition.state.groups[sample.group].batch
        raise _Refusal(f"sample {message.sample} is in batch {batch} already")
    discard_group(transition, sample.group, message.reason, culprit=message.sample, detail=message.detail)


def _next(transition: Transition, message: wire.BatchRequest) -> None:
    if answer_again(transition, message):
        return
    if message.request in transition.state.pending:
        transition.record(events.BatchRequestClosed(message.request))
    fault = None
    if message.max_samples < 1:
        fault = f"a batch of at most {message.max_samples} samples holds nothing"
    elif not (isfinite(message.deadline_s) and message.deadline_s >= 0):
        fault = f"deadline {message.deadline_s} is not a number of seconds"
    if fault is None:
        transition.record(events.BatchRequested(message, transition.now))
    else:
        transition.answer(wire.Declined(message.request, fault))


def _withdraw(transition: Transition, message: wire.Withdraw) -> None:
    state = transition.state
    if message.asked in state.pending:
        transition.record(events.BatchRequestClosed(message.asked))
    for number, batch in tuple(state.batches.items()):
        if batch.request.request == message.asked:
            step = state.steps[step_key(batch.request.step, batch.request.purpose)]
            ended = step.ended or (step.step, step.purpose) in {(e.step, e.purpose) for e in transition.fleet.ending}
            transition.record(events.BatchReturned(number, transition.now))
            if ended:
                for group in batch.groups:
                    discard_group(transition, group, DiscardReason.SURPLUS, notify=False)
                transition.record(events.StepEnded(step.step, step.purpose, at=transition.now))


def _take_notices(transition: Transition, message: wire.NoticesTaken) -> None:
    wanted, taken = set(message.groups), list[int]()
    for notice in itertools.chain.from_iterable(step.notices for step in transition.state.steps.values()):
        if len(taken) == len(wanted):
            break  # they mostly come in the order in which they were said
        if notice.group in wanted:
            taken.append(notice.group)
    if taken:
        transition.record(events.DropsKnown(taken))


def _acknowledge(transition: Transition, message: wire.Acknowledge) -> None:
    if not 0 <= message.batch < transition.state.next_batch:
        raise _Refusal(f"batch {message.batch} was never packed")
    if message.batch in transition.state.batches:
        _end_batch(transition, message.batch)


def _end_batch(transition: Transition, batch: int) -> None:
    state = transition.state
    transition.record(events.BatchAcknowledged(batch, transition.now, kept=state.covers))
    while state.kept_tokens > state.config.kept_tokens:
        transition.record(events.BatchReleased(next(iter(state.kept)), early=True, at=transition.now))


def _cover(transition: Transition, batches: Iterable[tuple[int, int]]) -> None:
    ranges = list(batches)
    for batch in tuple(transition.state.kept):
        if has_number(ranges, batch):
            transition.record(events.BatchReleased(batch, early=False, at=transition.now))


def _end_step(transition: Transition, message: wire.EndStep) -> None:
    groups, step = transition.state.groups, (message.step, message.purpose)
    left = [number for number, one in reversed(groups.items()) if (one.group.step, one.group.purpose) == step]
    # What is complete before all: with nothing else left it would answer a request. Then what waits: it would be given
    # to engines that the others leave.
    ended = sorted(left, key=lambda number: (groups[number].ready, len(groups[number].waiting)))
    transition.fleet.ending.setdefault(message, ended)
    end_steps(transition)


def end_steps(transition: Transition) -> None:
    """Discards a part of what is left of steps that the trainer has ended; the rest in the next ticks. The trainer
    hears of it after the last one: a manager that was started meanwhile knows nothing of it, and is asked again."""
    state, ending, most = transition.state, transition.fleet.ending, DISCARDED_AT_ONCE
    for message, groups in tuple(ending.items()):
        while groups and most > 0:
            entry = state.groups.get(number := groups.pop())
            if entry is not None and entry.batch < 0:
                discard_group(transition, number, DiscardReason.SURPLUS, notify=False)
                most -= entry.group.n
        if groups:
            transition.record(events.PlacementPaused(transition.now))
            return
        del ending[message]
        step = state.steps.get(step_key(message.step, message.purpose))
        if step is None or not (step.open or step.ready):  # else more was submitted meanwhile
            transition.record(events.StepEnded(message.step, message.purpose, at=transition.now))
        transition.record(events.RequestDone(message.request, digest_of(message)))
        transition.answer(wire.Accepted(message.request))


def _publish(transition: Transition, message: wire.PublishVersion) -> None:
    newest, published = transition.state.weights, message.weights
    if not 0 <= published.version <= MAX_COUNT:
        raise _Refusal(f"version {published.version} is not in 0 .. {MAX_COUNT}")
    same = published.manifest_hash == newest.manifest_hash or newest.content == published.content != b""
    if published.version == newest.version and not same:
        raise _Refusal(f"version {published.version} was published before, with other contents")
    if published.version < newest.version or published == newest:
        return
    transition.record(events.VersionPublished(published, transition.now))
    for name in transition.state.engines:
        announce(transition, name)


def _report(transition: Transition, message: wire.TrainerReport) -> None:
    # Status is JSON, which has no NaN: a loss that is none would make it unreadable for the operator.
    finite = {name: value for name, value in message.values.items() if isfinite(value)}
    transition.record(events.Reported(message.phase, message.step, values=finite, at=transition.now))
    for departure in departures(message.engines):
        pause_departed(transition, departure, message.step)
    transition.record(events.RequestDone(message.request, digest_of(message)))


def _finish(transition: Transition, end: wire.FinishRun) -> None:
    if transition.state.finished:
        return
    _cover(transition, ((0, transition.state.next_batch),))
    for number in tuple(transition.state.groups):
        discard_group(transition, number, DiscardReason.CANCELLED, notify=False)
    transition.record(events.RunFinished(end.ok, end.message, at=transition.now))
    for name in transition.state.engines:
        drain_engine(transition, name, deadline_s=0.0, reason="the run is over")


_HANDLERS: Final[dict[type, _Handler]] = {
    wire.Submit: _submit,
    wire.Score: _score,
    wire.Extend: _extend,
    wire.Reject: _reject,
    wire.Withdraw: _withdraw,
    wire.Acknowledge: _acknowledge,
    wire.Covered: lambda transition, message: _cover(transition, message.batches),
    wire.PublishVersion: _publish,
    wire.TrainerReport: _report,
    wire.FinishRun: _finish,
}
