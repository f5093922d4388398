"""Samples as they come over the wire."""

from __future__ import annotations

import numpy as np

from polyrl.sample import Finish, Response, Span
from polyrl_trainer.data.examples import Prompt
from polyrl_trainer.data.tokenizers import CharacterTokenizer
from polyrl_trainer.generation.from_wire import to_sample
from polyrl_trainer.user_code.workers import messages

PROMPT = Prompt("row 1", "a", ids=(1, 3), metadata={"answer": "b", "tests": ["one"]})


def response(finish: Finish) -> Response:
    ids = np.array([4, 2], dtype="<u4").tobytes()
    return Response("5.0", ids, logprobs=bytes(8), loss_mask=b"\1\1", spans=(), turn=0, finish=finish)


def test_what_one_call_writes_into_its_metadata_no_sibling_sees() -> None:
    tokenizer = CharacterTokenizer("ab")
    first, second = (to_sample(5, index, response(Finish.STOP), PROMPT, tokenizer) for index in range(2))
    first.metadata["tests"].append("two")
    first.metadata["answer"] = "c"
    assert second.metadata == PROMPT.metadata == {"answer": "b", "tests": ["one"]}


def test_a_sample_says_why_it_ended() -> None:
    tokenizer = CharacterTokenizer("ab")
    for finish in Finish:
        assert to_sample(5, 0, response(finish), PROMPT, tokenizer).finish_reason == finish.value


def test_user_code_reads_where_each_turn_begins() -> None:
    spans = (Span(0, 1, 0, "engine", 1), Span(1, 2, -1, "", 1), Span(2, 3, 0, "engine", 1))
    ids, turn = np.array([3, 4, 3], dtype="<u4").tobytes(), 1
    two = Response("5.0", ids, logprobs=bytes(12), loss_mask=b"\1\0\1", spans=spans, turn=turn, finish=Finish.STOP)
    sample = to_sample(5, 0, two, PROMPT, CharacterTokenizer("ab"))
    assert messages.from_wire(messages.to_wire(sample)).turn_starts == (2, 4)
