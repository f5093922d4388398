"""How the state changes with what happens to samples, groups and batches: one function per event."""

from __future__ import annotations

from bisect import bisect_left, insort
from math import inf, isfinite
from typing import Final

from polyrl.ledger import events, speed
from polyrl.ledger.apply.work import count_work, work_name
from polyrl.ledger.causes import AVOIDED_CAUSES, MoveCause
from polyrl.ledger.state import (
    Assignment,
    BatchState,
    GroupState,
    LedgerState,
    OpenSpan,
    PendingRequest,
    SamplePhase,
    SampleState,
    StepState,
    group_tokens,
    step_key,
    tokens_left,
)
from polyrl.sample import ENVIRONMENT_VERSION, DiscardReason, Group, Purpose, group_digest, sample_id
from polyrl.wire import GroupDropped
from polyrl.wire.ranges import add_number

ENDED_MEMORY: Final = 8192
"""Ended groups of which it is remembered what they were: many steps' worth, for a submission that is repeated."""

MAX_LEFT: Final = 8
"""Silent engines of which it is remembered where a turn left them: more than it is taken back by, and not a fleet's."""

AVOID_S: Final = 60.0
"""How long an engine that failed a sample is its last choice: as long as the longest pause of an engine."""


def wake(state: LedgerState, at: float) -> None:
    """There is something to do at `at`."""
    state.due = min(state.due, at)


def increment(counts: dict[str, int], key: str, amount: int = 1) -> None:
    """Adds to a named count."""
    counts[key] = counts.get(key, 0) + amount


def _enter(sample: SampleState, phase: SamplePhase, at: float) -> None:
    sample.phase = phase
    sample.since = at


def _queue_sample(state: LedgerState, sample: SampleState, at: float) -> None:
    _enter(sample, SamplePhase.WAITING, at)
    group = state.groups[sample.group]
    if not group.waiting:
        insort(state.queue, group.key)
    insort(group.waiting, sample.index)


def _unqueue_sample(state: LedgerState, sample: SampleState) -> None:
    group = state.groups[sample.group]
    group.waiting.remove(sample.index)
    if not group.waiting:
        del state.queue[bisect_left(state.queue, group.key)]


def end_learning(state: LedgerState, at: float) -> None:
    """The trainer no longer learns what it was given last."""
    learner = state.learner
    if isfinite(learner.busy_since) and at > learner.busy_since and learner.tokens:
        learner.token_s = speed.smoothed(learner.token_s, (at - learner.busy_since) / learner.tokens)
    learner.busy_since, learner.tokens, learner.alone = inf, 0, False


def _is_learned_on(state: LedgerState, beside: int | None = None) -> bool:
    """Whether the trainer has a batch that it has not acknowledged, of a training step `beside` that one."""
    delivered = (batch.request for batch in state.batches.values())
    return any(request.purpose is Purpose.TRAIN and request.step != beside for request in delivered)


def _end_assignment(state: LedgerState, number: int, at: float) -> Assignment:
    end_recall(state, number)
    assignment = state.assignments.pop(number)
    sample = state.samples[assignment.sample]
    sample.assignment = 0
    engine = state.engines[assignment.engine]
    count_work(state, engine, at)
    engine.work.change(work_name(state.groups[sample.group].group), -1)
    del engine.running[number]
    growth = assignment.kv_end - assignment.length
    engine.kv -= assignment.kv
    engine.kv_growth -= growth
    engine.kv_since -= assignment.kv - growth
    engine.starting -= not assignment.begun
    if assignment.reading:
        speed.stop_reading(engine, assignment.reading)
    engine.gaps.pop(number, None)
    return assignment


def _step_of(state: LedgerState, group: Group) -> StepState:
    return state.steps[step_key(group.step, group.purpose)]


def _forget_group(state: LedgerState, group: Group) -> None:
    state.backlog -= state.groups.pop(group.id).tokens
    state.ended[group.id] = group_digest(group)
    if len(state.ended) > ENDED_MEMORY:
        del state.ended[next(iter(state.ended))]
    for index in range(group.n):
        del state.samples[sample_id(group.id, index)]


def apply_group_submitted(state: LedgerState, event: events.GroupSubmitted) -> None:
    group = event.group
    add_number(state.seen, group.id)
    step = state.steps.setdefault(step_key(group.step, group.purpose), StepState(group.step, group.purpose))
    step.ended = False
    step.submitted += 1
    if group.purpose is Purpose.TRAIN:
        state.usage.submit(work_name(group), group.step, event.at)
    step.open += 1
    state.counters.submitted += group.n
    state.groups[group.id] = GroupState(group, list(range(group.n)))
    insort(state.queue, state.groups[group.id].key)
    for index in range(group.n):
        state.samples[sample_id(group.id, index)] = SampleState(group.id, index, since=event.at)


def apply_numbers_taken(state: LedgerState, event: events.NumbersTaken) -> None:
    state.next_batch = max(state.next_batch, event.batch)
    state.next_assignment = max(state.next_assignment, event.assignment)
    if event.group:
        state.lost_below = max(state.lost_below, event.group)
        beyond = [(start, end) for start, end in state.seen if end > event.group]
        joined = beyond and beyond[0][0] <= event.group
        state.seen = [(0, beyond[0][1]), *beyond[1:]] if joined else [(0, event.group), *beyond]


def _forget_if_done(state: LedgerState, step: StepState) -> None:
    if step.ended and not (step.open or step.ready or step.packed):
        del state.steps[step_key(step.step, step.purpose)]


def apply_step_ended(state: LedgerState, event: events.StepEnded) -> None:
    if not _is_learned_on(state, beside=event.step if event.purpose is Purpose.TRAIN else None):
        end_learning(state, event.at)
    step = state.steps.get(step_key(event.step, event.purpose))
    if step is not None:
        step.ended = True
        step.notices.clear()
        _forget_if_done(state, step)


def apply_drops_known(state: LedgerState, event: events.DropsKnown) -> None:
    left = set(event.groups)
    for step in state.steps.values():
        place = 0
        while left and place < len(step.notices):
            if step.notices[place].group in left:
                left.discard(step.notices.pop(place).group)
            else:
                place += 1


def apply_assigned(state: LedgerState, event: events.Assigned) -> None:
    sample = state.samples[event.sample]
    _unqueue_sample(state, sample)
    _enter(sample, SamplePhase.ASSIGNED, event.at)
    sample.assignment, sample.kept_by = event.assignment, ""
    state.next_assignment = event.assignment + 1
    _begin_assignment(state, event, reading=event.reading)


def apply_reclaimed(state: LedgerState, event: events.Reclaimed) -> None:
    sample = state.samples[event.sample]
    if sample.assignment:
        _end_assignment(state, sample.assignment, event.at)
    else:
        _unqueue_sample(state, sample)
    dropped = sample.length - event.length
    sample.generated -= dropped  # within a turn all of it is generated
    state.counters.tokens_accepted -= dropped
    state.counters.tokens_in_vain += dropped
    del sample.ids[4 * event.length :], sample.logprobs[4 * event.length :]
    sample.spans = [span for span in sample.spans if span.start < event.length]
    sample.rewinds += 1
    _enter(sample, SamplePhase.ASSIGNED, event.at)
    sample.assignment = event.assignment
    # What others were left with beyond this length goes on from tokens that are dropped here.
    sample.left = {name: left for name, left in sample.left.items() if left[1] <= event.length and name != event.engine}
    _begin_assignment(state, event, reading=0)


def _begin_assignment(state: LedgerState, event: events.Assigned | events.Reclaimed, *, reading: int) -> None:
    sample = state.samples[event.sample]
    sample.attempt += 1
    group = state.groups[sample.group].group
    engine = state.engines[event.engine]
    if not engine.running:
        engine.on_trial = engine.on_trial or speed.is_stale(engine, event.at)
        speed.pause_window(engine, event.at)
    engine.assigned_at = event.at
    count_work(state, engine, event.at)
    engine.work.change(work_name(group), 1)
    reading = speed.begin_reading(engine, reading, event.at)
    engine.running[event.assignment] = None
    engine.starting += 1
    limit = sample.length + tokens_left(state, sample, engine.capacity.max_context)
    kv_end = min(limit, sample.length + max(1, event.kv - len(group.prompt_ids) // 4 - sample.length))
    engine.kv += event.kv
    engine.kv_growth += kv_end - sample.length
    engine.kv_since += event.kv - (kv_end - sample.length)
    state.assignments[event.assignment] = Assignment(
        sample=event.sample,
        engine=event.engine,
        # What it generates from now on is of what it serves, or of something newer.
        low=max(group.min_version, engine.version) if isinstance(event, events.Assigned) else group.min_version,
        high=group.max_version,
        length=sample.length,
        limit=limit,
        kv=event.kv,
        at=event.at,
        progress_at=event.at,
        reading=reading,
        kv_end=kv_end,
    )
    state.stall_due = min(state.stall_due, event.at + state.config.progress_deadline_s)
    wake(state, state.stall_due)


def apply_placement_paused(state: LedgerState, event: events.PlacementPaused) -> None:
    wake(state, event.until)


def apply_balance_paused(state: LedgerState, event: events.BalancePaused) -> None:
    state.balanced_at = event.at
    wake(state, event.until)


def apply_recall_sent(state: LedgerState, event: events.RecallSent) -> None:
    assignment = state.assignments[event.assignment]
    assignment.recall_cause, assignment.recall_target = event.cause, event.to
    state.engines[assignment.engine].recalled += 1
    state.engines[event.to].reserved_kv[event.assignment] = event.kv


def end_recall(state: LedgerState, number: int) -> None:
    """Nobody waits any longer for an assignment to be given back."""
    assignment = state.assignments[number]
    if assignment.recall_cause:
        state.engines[assignment.engine].recalled -= 1
        to = state.engines.get(assignment.recall_target)
        if to is not None:
            to.reserved_kv.pop(number, None)
        assignment.recall_cause, assignment.recall_target = None, ""


def apply_moved(state: LedgerState, event: events.Moved) -> None:
    assignment = _end_assignment(state, event.assignment, event.at)
    sample = state.samples[assignment.sample]
    sample.moved_at = event.at
    if event.cause is MoveCause.REBALANCED:
        made = sample.length - sample.spans[-1].start if assignment.begun else 0
        engine = state.engines[assignment.engine]
        reads = not made and bool(assignment.reading or engine.reading)
        speed.end_trial(engine, made, event.at - assignment.at, reads=reads)
    is_failure = event.cause in AVOIDED_CAUSES
    sample.avoid = assignment.engine if is_failure else ""
    sample.avoid_until = event.at + AVOID_S if is_failure else -inf
    if event.cause is MoveCause.REJECTED:
        sample.rejections += 1
        sample.refused_at = min(sample.refused_at, event.at)
        engine = state.engines[assignment.engine]
        engine.rejections += engine.quarantined_until <= event.at  # what it had got before it paused says no more
        if assignment.engine not in sample.rejected_by:
            sample.rejected_by.append(assignment.engine)
    if event.cause is MoveCause.LOST:
        state.engines[assignment.engine].bereft = True
        sample.left = dict([*sample.left.items(), (assignment.engine, (event.assignment, sample.length))][-MAX_LEFT:])
    increment(state.counters.migrations, event.cause)
    _queue_sample(state, sample, event.at)


def apply_turn_ended(state: LedgerState, event: events.TurnEnded) -> None:
    sample = state.samples[event.sample]
    if sample.assignment:
        sample.kept_by = _end_assignment(state, sample.assignment, event.at).engine
    else:
        _unqueue_sample(state, sample)
    state.lengths.end(sample.length_class)
    state.usage.end_turn(work_name(state.groups[sample.group].group), event.at)
    sample.left.clear()
    sample.finish = event.finish
    sample.asks, sample.ask_due = 1, event.ask_due
    _enter(sample, SamplePhase.TURN_DONE, event.at)
    state.awaiting_verdict[event.sample] = None
    state.ask_due = min(state.ask_due, event.ask_due)
    wake(state, event.ask_due)


def apply_verdict_requested(state: LedgerState, event: events.VerdictRequested) -> None:
    sample = state.samples[event.sample]
    sample.asks += 1
    sample.ask_due = event.ask_due
    state.ask_due = min(state.ask_due, event.ask_due)
    wake(state, event.ask_due)


def apply_turn_extended(state: LedgerState, event: events.TurnExtended) -> None:
    sample = state.samples[event.sample]
    del state.awaiting_verdict[event.sample]
    start = sample.length
    sample.ids += event.ids
    sample.logprobs += bytes(len(event.ids))
    sample.spans.append(OpenSpan(start, sample.length, version=ENVIRONMENT_VERSION, engine="", attempt=sample.attempt))
    sample.turn += 1
    sample.turn_start = sample.trainer_has = sample.length
    sample.length_class = -1
    sample.finish = None
    _queue_sample(state, sample, event.at)


def apply_sample_scored(state: LedgerState, event: events.SampleScored) -> None:
    sample = state.samples[event.sample]
    del state.awaiting_verdict[event.sample]
    sample.reward, sample.metrics = event.reward, event.metrics
    state.groups[sample.group].scored += 1
    _enter(sample, SamplePhase.SCORED, event.at)


def apply_group_completed(state: LedgerState, event: events.GroupCompleted) -> None:
    entry = state.groups[event.group]
    entry.ready = True
    if entry.group.purpose is Purpose.TRAIN:
        entry.tokens = group_tokens(state, event.group)
        state.backlog += entry.tokens
    step = _step_of(state, entry.group)
    step.open -= 1
    step.ready.append(event.group)
    step.ready_samples += entry.group.n


def apply_group_discarded(state: LedgerState, event: events.GroupDiscarded) -> None:
    entry = state.groups[event.group]
    group = entry.group
    for index in range(group.n):
        name = sample_id(group.id, index)
        sample = state.samples[name]
        if sample.assignment:
            _end_assignment(state, sample.assignment, event.at)
        state.awaiting_verdict.pop(name, None)
        sibling = bool(event.culprit) and name != event.culprit
        increment(state.counters.discarded, DiscardReason.GROUP_INCOMPLETE if sibling else event.reason)
    if entry.waiting:
        del state.queue[bisect_left(state.queue, entry.key)]
    _leave_step(state, entry)
    step = _step_of(state, group)
    step.dropped += 1
    if event.notify:
        step.notices.append(
            GroupDropped(group.id, group.step, purpose=group.purpose, reason=event.reason, detail=event.detail)
        )
    _forget_group(state, group)
    _forget_if_done(state, step)


def _leave_step(state: LedgerState, entry: GroupState) -> None:
    step, number = _step_of(state, entry.group), entry.group.id
    if entry.batch >= 0:
        step.packed -= 1
        batch = state.batches[entry.batch]
        batch.groups.remove(number)
        if not batch.groups:
            del state.batches[entry.batch]
    elif entry.ready:
        step.ready.remove(number)
        step.ready_samples -= entry.group.n
    else:
        step.open -= 1


def apply_batch_requested(state: LedgerState, event: events.BatchRequested) -> None:
    end_learning(state, event.at)
    due = event.at + event.wanted.deadline_s
    state.pending[event.wanted.request] = PendingRequest(event.wanted, event.at, due=due)
    wake(state, due)


def apply_batch_request_closed(state: LedgerState, event: events.BatchRequestClosed) -> None:
    del state.pending[event.request]


def apply_batch_packed(state: LedgerState, event: events.BatchPacked) -> None:
    del state.pending[event.wanted.request]
    state.next_batch = event.batch + 1
    if not event.groups:
        return
    state.batches[event.batch] = BatchState(event.wanted, list(event.groups), last=event.last)
    state.learner.held_until = -inf
    learned = event.wanted.purpose is Purpose.TRAIN and (event.wanted.alone or not state.pending)
    if learned or event.wanted.alone:
        # A trainer that has asked for more already says that it needs its devices for nothing yet. What follows an
        # evaluation that needs them is learned from a file.
        state.learner.alone |= event.wanted.alone
        state.learner.busy_since = min(state.learner.busy_since, event.at)
    if learned:
        tokens = sum(group_tokens(state, number) for number in event.groups)
        state.learner.tokens += tokens
        state.learner.group_tokens = speed.smoothed(state.learner.group_tokens, tokens / len(event.groups))
    for number in event.groups:
        entry = state.groups[number]
        entry.batch = event.batch
        step = _step_of(state, entry.group)
        step.ready.remove(number)
        step.ready_samples -= entry.group.n
        step.packed += 1
        for index in range(entry.group.n):
            _enter(state.samples[sample_id(number, index)], SamplePhase.PACKED, event.at)


def apply_batch_returned(state: LedgerState, event: events.BatchReturned) -> None:
    if event.batch in state.kept:
        _offer_again(state, event)
        return
    returned = state.batches.pop(event.batch)
    learned = returned.groups if returned.request.purpose is Purpose.TRAIN else ()
    state.learner.give_back(sum(group_tokens(state, number) for number in learned), has_more=bool(state.batches))
    for number in reversed(returned.groups):
        entry = state.groups[number]
        entry.batch = -1
        step = _step_of(state, entry.group)
        step.packed -= 1
        step.ended = False
        step.ready.insert(0, number)
        step.ready_samples += entry.group.n
        for index in range(entry.group.n):
            _enter(state.samples[sample_id(number, index)], SamplePhase.SCORED, event.at)


def apply_batch_acknowledged(state: LedgerState, event: events.BatchAcknowledged) -> None:
    numbers = state.batches.pop(event.batch).groups
    # Where it needs them alone, further passes over the step may follow, and engines that wake would take their room.
    if not (state.learner.alone or _is_learned_on(state)):
        end_learning(state, event.at)
    for number in numbers:
        group = state.groups[number].group
        step = _step_of(state, group)
        step.packed -= 1
        step.acknowledged += 1
        state.counters.acknowledged += group.n
        if event.kept:
            _keep_group(state, number, event.at)
        else:
            _forget_group(state, group)
        _forget_if_done(state, step)
    if event.kept:
        state.kept[event.batch] = numbers


def _keep_group(state: LedgerState, number: int, at: float) -> None:
    entry = state.groups[number]
    state.backlog -= entry.tokens
    entry.tokens = 0
    state.kept_tokens += group_tokens(state, number)
    for index in range(entry.group.n):
        _enter(state.samples[sample_id(number, index)], SamplePhase.KEPT, at)


def apply_batch_released(state: LedgerState, event: events.BatchReleased) -> None:
    for number in state.kept.pop(event.batch):
        group = state.groups[number].group
        state.kept_tokens -= group_tokens(state, number)
        state.counters.released_early += group.n * event.early
        _forget_group(state, group)


def _offer_again(state: LedgerState, event: events.BatchReturned) -> None:
    """Its groups are complete, as before they were packed."""
    for number in reversed(state.kept.pop(event.batch)):
        entry = state.groups[number]
        group, tokens = entry.group, group_tokens(state, number)
        step = state.steps.setdefault(step_key(group.step, group.purpose), StepState(group.step, group.purpose))
        step.submitted += not step.acknowledged
        step.acknowledged = max(0, step.acknowledged - 1)
        step.ended = False
        step.ready.insert(0, number)
        step.ready_samples += group.n
        state.counters.acknowledged -= group.n
        state.counters.offered_again += group.n
        state.kept_tokens -= tokens
        entry.batch, entry.trained_in = -1, event.batch
        if group.purpose is Purpose.TRAIN:
            entry.tokens = tokens
            state.backlog += tokens
        for index in range(group.n):
            _enter(state.samples[sample_id(number, index)], SamplePhase.SCORED, event.at)
