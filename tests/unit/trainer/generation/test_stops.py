"""Stop strings end a response with the token that completes them."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from polyrl.manifest.recipe import RecipeSpec
from polyrl.sample import ENVIRONMENT_VERSION, Finish, Response, SamplingParams, Span
from polyrl_trainer.data.tokenizers import EOS_ID, CharacterTokenizer
from polyrl_trainer.generation.stops import unexplained_stops, up_to_stop
from polyrl_trainer.preparation import stop_token_ids
from polyrl_trainer.sample import Sample

TOKENIZER = CharacterTokenizer("abc.")


def response(text: str) -> Response:
    """Two engines drew it, the second from position 2 on."""
    ids = [*TOKENIZER.encode_text(text), EOS_ID]
    spans = (Span(0, 2, version=1, engine="x", attempt=1), Span(2, len(ids), version=2, engine="y", attempt=2))
    return Response(
        "1.0",
        np.array(ids, dtype="<u4").tobytes(),
        logprobs=np.arange(len(ids), dtype="<f4").tobytes(),
        loss_mask=b"\1" * len(ids),
        spans=spans,
        turn=0,
        finish=Finish.LENGTH,
    )


@pytest.mark.parametrize(
    ("stop", "kept"),
    [([".."], "abc.."), (["ab"], "ab"), ([".c", "c."], "abc."), (["abc..ca"], "abc..ca")],
)
def test_it_ends_with_the_token_that_completes_the_first(stop: list[str], kept: str) -> None:
    cut = up_to_stop(response("abc..ca"), stop, TOKENIZER)
    assert TOKENIZER.decode(np.frombuffer(cut.ids, "<u4").tolist()) == kept
    assert np.frombuffer(cut.logprobs, "<f4").tolist() == list(range(len(kept)))
    assert cut.loss_mask == b"\1" * len(kept)
    assert cut.spans[-1].end == len(kept)
    assert len(cut.spans) == (1 if len(kept) == 2 else 2)
    assert cut.finish is Finish.STOP


def test_a_turn_ends_by_its_own_text_not_by_an_earlier_turns() -> None:
    first, written, last = "ab", "ab.", "ca.bc"
    ends = np.cumsum([len(first), len(written), len(last)]).tolist()
    spans = (
        Span(0, ends[0], version=1, engine="x", attempt=1),
        Span(ends[0], ends[1], version=ENVIRONMENT_VERSION, engine="", attempt=1),
        Span(ends[1], ends[2] + 1, version=1, engine="x", attempt=1),
    )
    whole = replace(response(first + written + last), spans=spans, turn=1)
    assert up_to_stop(whole, ["ab"], TOKENIZER) is whole, "what an environment wrote and the turn before do not count"
    assert up_to_stop(whole, [".c"], TOKENIZER) is whole, "nor does what one ends and the other begins"
    cut = up_to_stop(whole, ["ab", ".b"], TOKENIZER)
    assert TOKENIZER.decode(np.frombuffer(cut.ids, "<u4").tolist()) == first + written + "ca.b"
    assert (cut.spans[-1].end, cut.finish) == (9, Finish.STOP)


def test_one_that_holds_none_is_left_as_it_is() -> None:
    whole = response("abca")
    assert up_to_stop(whole, ["aa", "."], TOKENIZER) is whole
    assert up_to_stop(whole, [], TOKENIZER) is whole


def test_engines_stop_at_tokens_that_hold_a_string_by_themselves() -> None:
    recipe = RecipeSpec.model_validate(
        {"model": {"config": {"model_type": "qwen2"}}, "sampling": {"stop": [".", "ab"]}}
    )
    assert stop_token_ids(recipe, TOKENIZER) == (EOS_ID, EOS_ID + 4)


def sample(text: str, finish: str) -> Sample:
    ids = TOKENIZER.encode_text(text)
    return Sample(np.array(ids), np.ones(len(ids)), prompt_length=0, response=text, finish_reason=finish)


def test_ends_that_nothing_explains_are_counted() -> None:
    sampling = SamplingParams(8, stop_token_ids=(EOS_ID, *TOKENIZER.encode_text("c")), stop=("ab", "bb"))
    honest = [sample("ac", "stop"), sample("bab", "stop"), sample("ba", "length")]
    assert unexplained_stops(honest, sampling) == 0
    assert unexplained_stops([*honest, sample("ba", "stop")], sampling) == 0.25
