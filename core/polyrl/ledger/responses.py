"""Samples in the form in which the trainer gets them."""

from __future__ import annotations

from polyrl.ledger.state import ENVIRONMENT_VERSION, LedgerState, SampleState
from polyrl.sample import Finish, Response, Scored, Span, sample_id, split_sample_id
from polyrl.wire import TurnDone


def response_of(name: str, sample: SampleState) -> Response:
    """All that was generated and written so far; spans cover every position."""
    spans = tuple(Span(s.start, s.end, s.version, s.engine, s.attempt) for s in sample.spans)
    mask = b"".join((b"\x00" if s.version == ENVIRONMENT_VERSION else b"\x01") * (s.end - s.start) for s in spans)
    return Response(
        sample=name,
        ids=bytes(sample.ids),
        logprobs=bytes(sample.logprobs),
        loss_mask=mask,
        spans=spans,
        turn=sample.turn,
        finish=sample.finish or Finish.STOP,
    )


def turn_done(state: LedgerState, name: str) -> TurnDone:
    """The question for a sample's verdict."""
    number, index = split_sample_id(name)
    group = state.groups[number].group
    response = response_of(name, state.samples[name])
    return TurnDone(number, index, purpose=group.purpose, step=group.step, response=response)


def scored_group(state: LedgerState, number: int) -> list[Scored]:
    """The samples of a complete group, by index."""
    samples = []
    for index in range(state.groups[number].group.n):
        name = sample_id(number, index)
        sample = state.samples[name]
        response = response_of(name, sample)
        samples.append(Scored(number, index, response=response, reward=sample.reward, metrics=sample.metrics))
    return samples


def group_tokens(state: LedgerState, number: int) -> int:
    """Prompt and response tokens of all its samples."""
    group = state.groups[number].group
    responses = sum(state.samples[sample_id(number, index)].length for index in range(group.n))
    return group.n * (len(group.prompt_ids) // 4) + responses
