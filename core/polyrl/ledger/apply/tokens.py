"""How the state changes with tokens that come: the sample's text and spans, its engine's room and speed."""

from __future__ import annotations

from typing import Final

from polyrl.ledger import events, speed
from polyrl.ledger.measures.lengths import BOUNDS
from polyrl.ledger.state import Assignment, LeasedEngine, LedgerState, OpenSpan
from polyrl.sample import Pool
from polyrl.wire import row_columns

KV_STEP: Final = 256
"""Tokens of KV room set aside at least for a turn that outgrew what was expected: some seconds of its engine."""


def apply_tokens_taken(state: LedgerState, event: events.TokensTaken) -> None:
    numbers, _, counts, _ = row_columns(event.rows)
    assignments, samples, ids, logprobs = state.assignments, state.samples, event.ids, event.logprobs
    version, at, begin = event.version, event.at, 0
    engine = state.engines[event.engine]
    beginning = first_tokens = 0
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
        assignment.length = stop = position + size
        assignment.progress_at = at
        if stop > assignment.kv_end:
            _set_more_aside(engine, assignment)
        length_class, turn_tokens = sample.length_class, stop - sample.turn_start
        if turn_tokens >= BOUNDS[length_class + 1]:
            sample.length_class = state.lengths.grow(length_class, turn_tokens)
        spans, attempt = sample.spans, sample.attempt
        if spans and (last := spans[-1]).attempt == attempt and last.version == version:
            last.end = stop
        else:
            spans.append(OpenSpan(position, stop, version=version, engine=event.engine, attempt=attempt))
            engine.rejections = 0
            if not assignment.begun:
                assignment.begun = True
                engine.starting -= 1
                beginning += 1
                first_tokens += size
            if assignment.reading:
                speed.end_reading(engine, assignment.reading, at)
                assignment.reading = 0
        begin = end
    _count_deltas(state, event, begin >> 2)
    if begin:
        _observe(state, event, (begin >> 2) - first_tokens, beginning)
    engine.kv_growth -= begin >> 2
    engine.kv_since += begin >> 2
    if engine.gaps:
        for number in numbers:
            engine.gaps.pop(number, None)


def _set_more_aside(engine: LeasedEngine, assignment: Assignment) -> None:
    """A turn that outgrew what was expected will go on: by half of what it has, or KV_STEP."""
    end = min(assignment.limit, assignment.length + max(KV_STEP, assignment.length // 2))
    more = end - assignment.kv_end
    assignment.kv_end, assignment.kv = end, assignment.kv + more
    engine.kv += more
    engine.kv_growth += more


def _count_deltas(state: LedgerState, event: events.TokensTaken, tokens: int) -> None:
    counters = state.counters
    counters.delta_frames += 1
    counters.delta_bytes += event.frame_bytes
    counters.tokens_accepted += tokens
    counters.tokens_in_vain += event.in_vain
    counters.tokens_repeated += event.repeated
    engine = state.engines[event.engine]
    engine.heard_at = event.at
    engine.seq = max(engine.seq, event.seq)
    if not tokens:
        return
    engine.failures = 0
    engine.tokens += tokens


def _observe(state: LedgerState, event: events.TokensTaken, tokens: int, beginning: int) -> None:
    """`tokens` came of what had begun before; `beginning` samples have begun since the frame before."""
    engine = state.engines[event.engine]
    if state.window_open or engine.pool is not Pool.RESERVED:
        decoding = len(engine.running) - engine.starting - beginning
        speed.observe_tokens(engine, tokens, decoding, event.at)
    else:
        engine.token_at = event.at  # its devices learn meanwhile
