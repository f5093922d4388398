"""Fold of what happens to samples, groups and batches. Part of `fold`: no other module may call these.

Refuses to hold: decisions. Read next: `fold_engines`.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from polyrl.ledger import events as f
from polyrl.ledger import speed
from polyrl.ledger.apply.counting import count, wake
from polyrl.ledger.responses import group_tokens
from polyrl.ledger.state import (
    ENVIRONMENT_VERSION,
    Assignment,
    BatchState,
    GroupState,
    OpenSpan,
    Pending,
    Phase,
    SampleState,
    State,
    StepState,
    step_key,
)
from polyrl.sample import DiscardReason, Group, Purpose, sample_id
from polyrl.wire import GroupDropped, row_columns


def _enter(sample: SampleState, phase: Phase, at: float) -> None:
    sample.phase = phase
    sample.since = at


def _queue_sample(state: State, sample: SampleState, at: float) -> None:
    _enter(sample, Phase.WAITING, at)
    group = state.groups[sample.group]
    if not group.waiting:
        insort(state.queue, group.key)
    insort(group.waiting, sample.index)


def _unqueue_sample(state: State, sample: SampleState) -> None:
    group = state.groups[sample.group]
    group.waiting.remove(sample.index)
    if not group.waiting:
        del state.queue[bisect_left(state.queue, group.key)]


def _end_assignment(state: State, number: int) -> Assignment:
    unask(state, number)
    assignment = state.assignments.pop(number)
    state.samples[assignment.sample].assignment = 0
    engine = state.engines[assignment.engine]
    del engine.running[number]
    engine.kv -= assignment.kv
    if assignment.reading:
        speed.stop_reading(engine, assignment.reading)
    engine.gaps.pop(number, None)
    return assignment


def _step_of(state: State, group: Group) -> StepState:
    return state.steps[step_key(group.step, group.purpose)]


def _forget_group(state: State, group: Group) -> None:
    state.backlog -= state.groups.pop(group.id).tokens
    for index in range(group.n):
        del state.samples[sample_id(group.id, index)]


def group_submitted(state: State, fact: f.GroupSubmitted) -> None:
    group = fact.group
    _mark_seen(state, group.id)
    key = step_key(group.step, group.purpose)
    if key not in state.steps:
        _forget_old_steps(state, group)
        state.steps[key] = StepState(group.step, group.purpose)
    state.steps[key].submitted += 1
    state.steps[key].open += 1
    state.counters.submitted += group.n
    state.groups[group.id] = GroupState(group, list(range(group.n)))
    insort(state.queue, state.groups[group.id].key)
    for index in range(group.n):
        state.samples[sample_id(group.id, index)] = SampleState(group.id, index, fact.at)


def _mark_seen(state: State, number: int) -> None:
    ranges = state.seen
    place = bisect_left(ranges, (number, number))
    start = end = number
    if place and ranges[place - 1][1] == number:
        place -= 1
        start = ranges.pop(place)[0]
    end = ranges.pop(place)[1] if place < len(ranges) and ranges[place][0] == number + 1 else number + 1
    ranges.insert(place, (start, end))


def numbers_taken(state: State, fact: f.NumbersTaken) -> None:
    state.next_batch = max(state.next_batch, fact.batch)
    state.next_assignment = max(state.next_assignment, fact.assignment)
    if fact.group:
        beyond = [(start, end) for start, end in state.seen if end > fact.group]
        joined = beyond and beyond[0][0] <= fact.group
        state.seen = [(0, beyond[0][1]), *beyond[1:]] if joined else [(0, fact.group), *beyond]


def _forget_old_steps(state: State, newcomer: Group) -> None:
    done = [
        key
        for key, step in state.steps.items()
        if step.purpose is newcomer.purpose
        and step.step < newcomer.step
        and not (step.open or step.ready or step.packed)
    ]
    for key in done:
        del state.steps[key]


def assigned(state: State, fact: f.Assigned) -> None:
    sample = state.samples[fact.sample]
    _unqueue_sample(state, sample)
    _enter(sample, Phase.ASSIGNED, fact.at)
    sample.assignment = fact.assignment
    sample.attempt += 1
    state.next_assignment = fact.assignment + 1
    group = state.groups[sample.group].group
    engine = state.engines[fact.engine]
    if not engine.running:
        engine.on_trial = engine.on_trial or speed.is_stale(engine, fact.at)
        speed.begin_window(engine, fact.at)
    engine.assigned_at = fact.at
    reading = speed.begin_reading(engine, fact.reading, fact.at)
    engine.running[fact.assignment] = None
    engine.kv += fact.kv
    state.assignments[fact.assignment] = Assignment(
        sample=fact.sample,
        engine=fact.engine,
        low=group.min_version,
        high=group.max_version,
        length=sample.length,
        limit=sample.length + group.sampling.max_new_tokens - sample.generated,
        kv=fact.kv,
        at=fact.at,
        progress_at=fact.at,
        reading=reading,
    )
    wake(state, fact.at + state.config.progress_deadline_s)


def placement_held(state: State, fact: f.PlacementHeld) -> None:
    wake(state, fact.until)


def placement_paused(state: State, fact: f.PlacementPaused) -> None:
    wake(state, fact.at)


def balance_paused(state: State, fact: f.BalancePaused) -> None:
    state.balanced_at = fact.at
    wake(state, fact.until)


def tokens_taken(state: State, fact: f.TokensTaken) -> None:
    numbers, _, counts, _ = row_columns(fact.rows)
    assignments, samples, ids, logprobs = state.assignments, state.samples, fact.ids, fact.logprobs
    version, at, begin = fact.version, fact.at, 0
    for number, size in zip(numbers, counts, strict=True):
        if not size:
            continue
        end = begin + 4 * size
        assignment = assignments[number]
        sample = samples[assignment.sample]
        sample.ids += ids[begin:end]
        sample.logprobs += logprobs[begin:end]
        sample.generated += size
        position = assignment.length
        assignment.length = position + size
        assignment.progress_at = at
        last = sample.spans[-1] if sample.spans else None
        if last is not None and last.attempt == sample.attempt and last.version == version:
            last.end = position + size
        else:
            sample.spans.append(OpenSpan(position, position + size, version, fact.engine, sample.attempt))
            if assignment.reading:
                speed.end_reading(state.engines[fact.engine], assignment.reading, at)
                assignment.reading = 0
        begin = end
    _count_deltas(state, fact, len(numbers), begin >> 2)
    gaps = state.engines[fact.engine].gaps
    if gaps:
        for number in numbers:
            gaps.pop(number, None)


def _count_deltas(state: State, fact: f.TokensTaken, rows: int, tokens: int) -> None:
    counters = state.counters
    counters.delta_frames += 1
    counters.delta_rows += rows
    counters.delta_bytes += fact.frame_bytes
    counters.tokens_accepted += tokens
    counters.tokens_in_vain += fact.in_vain
    counters.tokens_repeated += fact.repeated
    engine = state.engines[fact.engine]
    engine.heard_at = fact.at
    if not tokens:
        return
    engine.strikes = 0
    engine.tokens += tokens
    speed.observe_tokens(engine, tokens, fact.at)


def return_asked(state: State, fact: f.ReturnAsked) -> None:
    assignment = state.assignments[fact.assignment]
    assignment.asked, assignment.goes_to = fact.cause, fact.to
    state.engines[assignment.engine].leaving += 1
    state.engines[fact.to].coming[fact.assignment] = fact.kv


def unask(state: State, number: int) -> None:
    """Nobody waits any longer for an assignment to be given back."""
    assignment = state.assignments[number]
    if assignment.asked:
        state.engines[assignment.engine].leaving -= 1
        to = state.engines.get(assignment.goes_to)
        if to is not None:
            to.coming.pop(number, None)
        assignment.asked = assignment.goes_to = ""


def moved(state: State, fact: f.Moved) -> None:
    assignment = _end_assignment(state, fact.assignment)
    sample = state.samples[assignment.sample]
    sample.moved_at = fact.at
    sample.avoid = assignment.engine
    sample.rejections += fact.cause == "rejected"
    count(state.counters.migrations, fact.cause)
    _queue_sample(state, sample, fact.at)


def turn_ended(state: State, fact: f.TurnEnded) -> None:
    sample = state.samples[fact.sample]
    if sample.assignment:
        _end_assignment(state, sample.assignment)
    else:
        _unqueue_sample(state, sample)
    counters = state.counters
    counters.mean_turn_tokens = speed.mean_after(counters, sample.length - sample.turn_start)
    counters.turns += 1
    sample.finish = fact.finish
    sample.asks = 1
    sample.ask_due = fact.ask_due
    _enter(sample, Phase.TURN_DONE, fact.at)
    state.asked[fact.sample] = None
    wake(state, fact.ask_due)


def turn_asked(state: State, fact: f.TurnAsked) -> None:
    sample = state.samples[fact.sample]
    sample.asks += 1
    sample.ask_due = fact.ask_due
    wake(state, fact.ask_due)


def turn_extended(state: State, fact: f.TurnExtended) -> None:
    sample = state.samples[fact.sample]
    del state.asked[fact.sample]
    start = sample.length
    sample.ids += fact.ids
    sample.logprobs += bytes(len(fact.ids))
    sample.spans.append(OpenSpan(start, sample.length, ENVIRONMENT_VERSION, "", sample.attempt))
    sample.turn += 1
    sample.turn_start = sample.length
    sample.finish = None
    _queue_sample(state, sample, fact.at)


def sample_scored(state: State, fact: f.SampleScored) -> None:
    sample = state.samples[fact.sample]
    del state.asked[fact.sample]
    sample.reward = fact.reward
    sample.metrics = fact.metrics
    state.groups[sample.group].scored += 1
    _enter(sample, Phase.SCORED, fact.at)


def group_completed(state: State, fact: f.GroupCompleted) -> None:
    entry = state.groups[fact.group]
    entry.ready = True
    if entry.group.purpose is Purpose.TRAIN:
        entry.tokens = group_tokens(state, fact.group)
        state.backlog += entry.tokens
    step = _step_of(state, entry.group)
    step.open -= 1
    step.ready.append(fact.group)


def group_discarded(state: State, fact: f.GroupDiscarded) -> None:
    entry = state.groups[fact.group]
    group = entry.group
    for index in range(group.n):
        name = sample_id(group.id, index)
        sample = state.samples[name]
        if sample.assignment:
            _end_assignment(state, sample.assignment)
        state.asked.pop(name, None)
        sibling = bool(fact.culprit) and name != fact.culprit
        count(state.counters.discarded, DiscardReason.GROUP_INCOMPLETE if sibling else fact.reason)
    if entry.waiting:
        del state.queue[bisect_left(state.queue, entry.key)]
    _leave_step(state, entry)
    step = _step_of(state, group)
    step.dropped += 1
    if fact.notify:
        step.notices.append(GroupDropped(group.id, group.step, group.purpose, fact.reason, fact.detail))
    _forget_group(state, group)


def _leave_step(state: State, entry: GroupState) -> None:
    step, number = _step_of(state, entry.group), entry.group.id
    if entry.batch >= 0:
        step.packed -= 1
        batch = state.batches[entry.batch]
        batch.groups.remove(number)
        if not batch.groups:
            del state.batches[entry.batch]
    elif entry.ready:
        step.ready.remove(number)
    else:
        step.open -= 1


def next_asked(state: State, fact: f.NextAsked) -> None:
    due = fact.at + fact.request.deadline_s
    state.pending[fact.request.request] = Pending(fact.request, fact.at, due)
    wake(state, due)


def next_closed(state: State, fact: f.NextClosed) -> None:
    del state.pending[fact.request]


def batch_packed(state: State, fact: f.BatchPacked) -> None:
    del state.pending[fact.request.request]
    state.next_batch = fact.batch + 1
    if not fact.groups:
        return
    state.batches[fact.batch] = BatchState(fact.request, list(fact.groups), fact.last)
    for number in fact.groups:
        entry = state.groups[number]
        entry.batch = fact.batch
        step = _step_of(state, entry.group)
        step.ready.remove(number)
        step.packed += 1
        for index in range(entry.group.n):
            _enter(state.samples[sample_id(number, index)], Phase.PACKED, fact.at)


def batch_returned(state: State, fact: f.BatchReturned) -> None:
    numbers = state.batches.pop(fact.batch).groups
    for number in reversed(numbers):
        entry = state.groups[number]
        entry.batch = -1
        step = _step_of(state, entry.group)
        step.packed -= 1
        step.ready.insert(0, number)
        for index in range(entry.group.n):
            _enter(state.samples[sample_id(number, index)], Phase.SCORED, fact.at)


def batch_acknowledged(state: State, fact: f.BatchAcknowledged) -> None:
    for number in state.batches.pop(fact.batch).groups:
        group = state.groups[number].group
        step = _step_of(state, group)
        step.packed -= 1
        step.acknowledged += 1
        state.counters.acknowledged += group.n
        _forget_group(state, group)
