"""Pairs: what both answers share is not learned, each way of writing a chat means the same, bad rows are refused."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.errors import InvalidData
from polyrl.manifest.data import DatasetSpec
from polyrl_trainer.check.unknown_tokenizer import UnknownTokenizer
from polyrl_trainer.data.preferences import pairs_are_chats, prepare_pairs, prepare_scored_pairs
from polyrl_trainer.data.rows import DataRow
from polyrl_trainer.data.tokenizers import BOS_ID, EOS_ID, PAD_ID, CharacterTokenizer
from polyrl_trainer.sample import Sample

TOKENIZER = CharacterTokenizer("0123456789=")
MAX_TOKENS = 12
TEXT = {"prompt": "1=", "chosen": "11", "rejected": "1"}


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


ASKED = [turn("user", "1="), turn("assistant", "2"), turn("user", "3=")]
GOOD, BAD = turn("assistant", "33"), turn("assistant", "4")


def pair(fields: dict[str, Any], prepare: Any = prepare_pairs, **dataset: Any) -> tuple[Sample, Sample]:
    spec = DatasetSpec.model_validate({"path": "a.jsonl", **dataset})
    (found,) = prepare([DataRow("f:1", fields)], spec, TOKENIZER, MAX_TOKENS)
    return found


def learned(sample: Sample) -> str:
    return TOKENIZER.decode([token for token, mask in zip(sample.tokens, sample.loss_mask, strict=True) if mask])


def test_of_text_the_answers_are_learned_with_their_ends() -> None:
    chosen, rejected = pair(TEXT)
    assert chosen.tokens.tolist() == [BOS_ID, 4, 13, 4, 4, EOS_ID]
    assert chosen.loss_mask.tolist() == [0, 0, 0, 1, 1, 1]
    assert rejected.tokens.tolist() == [BOS_ID, 4, 13, 4, EOS_ID]


CHATS = [
    pytest.param({"messages": ASKED, "chosen": "33", "rejected": "4"}, id="answers as text"),
    pytest.param({"messages": ASKED, "chosen": [GOOD], "rejected": [BAD]}, id="answers as messages"),
    pytest.param({"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]}, id="a prompt of messages"),
    pytest.param({"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]}, id="whole conversations"),
    pytest.param({"prompt": "3=", "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]}, id="and the prompt as text"),
]


@pytest.mark.parametrize("fields", CHATS)
def test_every_way_of_writing_a_chat_learns_the_same(fields: dict[str, Any]) -> None:
    chosen, rejected = pair(fields)
    assert TOKENIZER.decode(chosen.tokens.tolist()) == "1=23=33"
    assert (learned(chosen), learned(rejected)) == ("33", "4")
    assert chosen.loss_mask.tolist() == [0] * 7 + [1] * 3, "an answer that both have in common is not learned"
    assert pairs_are_chats(DataRow("f:1", fields), DatasetSpec(path="a.jsonl"))


@pytest.mark.parametrize(
    ("asked", "between"),
    [
        (ASKED[:2], turn("tool", "5")),
        ([*ASKED[:2], turn("tool", "6")], turn("tool", "5")),
        (ASKED[:2], turn("user", "3=")),
    ],
    ids=["a tool's", "another tool's", "a user's"],
)
def test_answers_may_begin_with_what_another_said_to_the_prompts_last_turn(
    asked: list[dict[str, Any]], between: dict[str, Any]
) -> None:
    """The prompt was left out of both, without a word."""
    for name in ("prompt", "messages"):
        chosen, rejected = pair({name: asked, "chosen": [between, GOOD], "rejected": [between, BAD]})
        assert TOKENIZER.decode(chosen.tokens.tolist()) == "".join(one["content"] for one in [*asked, between, GOOD])
        assert (learned(chosen), learned(rejected)) == ("33", "4")


def test_of_whole_conversations_the_messages_beside_them_are_not_read() -> None:
    """UltraFeedback's rows have the chosen one twice."""
    whole = [*ASKED, GOOD]
    assert pair({"messages": whole, "chosen": whole, "rejected": [*ASKED, BAD]})[0].length == 10


def test_a_prompt_of_text_before_messages_is_a_users() -> None:
    chosen, _ = pair({"prompt": "1=", "chosen": [GOOD], "rejected": [BAD]}, systemPrompt="9")
    assert TOKENIZER.decode(chosen.tokens.tolist()) == "91=33"
    assert learned(chosen) == "33"


def test_what_the_manifest_says_of_columns_holds() -> None:
    fields = {"question": "1=", "chosen": "11", "rejected": "1"}
    chosen, rejected = pair(fields, promptField="question", systemPrompt="9")
    assert [TOKENIZER.decode(one.tokens.tolist()) for one in (chosen, rejected)] == ["91=11", "91=1"]
    assert [learned(one) for one in (chosen, rejected)] == ["11", "1"]


def test_a_score_is_of_all_before_one_token_more() -> None:
    chosen, rejected = pair({**TEXT, "margin": 0.5}, prepare_scored_pairs)
    assert chosen.tokens.tolist() == [BOS_ID, 4, 13, 4, 4, EOS_ID, PAD_ID]
    assert chosen.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert chosen.advantages is not None
    assert chosen.advantages.tolist() == [0, 0, 0, 0, 0, 0, 0.5]
    assert rejected.advantages is not None
    assert not rejected.advantages.any()


def test_where_padding_is_the_end_of_text_the_token_before_it_is_scored() -> None:
    tokenizer = CharacterTokenizer("0123456789=")
    tokenizer.pad_id = None
    spec = DatasetSpec(path="a.jsonl")
    ((chosen, _),) = prepare_scored_pairs([DataRow("f:1", TEXT)], spec, tokenizer, MAX_TOKENS)
    assert chosen.tokens.tolist() == [BOS_ID, 4, 13, 4, 4, EOS_ID], "as transformers does, which takes it for padding"
    assert chosen.loss_mask.tolist() == [0, 0, 0, 0, 0, 1]


def test_null_is_no_value_where_a_column_is_another_rows() -> None:
    """Parquet gives each row every column."""
    chosen, _ = pair({**TEXT, "margin": None, "messages": None, "tools": None}, prepare_scored_pairs)
    assert chosen.advantages is not None
    assert not chosen.advantages.any()
    assert not pairs_are_chats(DataRow("f:1", {**TEXT, "messages": None}), DatasetSpec(path="a.jsonl"))


CALLING = [turn("assistant", "") | {"tool_calls": [{"function": {"name": name}}]} for name in ("add", "look")]


@pytest.mark.parametrize(
    "fields",
    [TEXT, {"messages": ASKED, "chosen": [CALLING[0]], "rejected": [CALLING[1]]}],
    ids=["texts", "calls of tools"],
)
def test_without_a_tokenizer_two_answers_stay_two(fields: dict[str, Any]) -> None:
    """No two of them are refused as one that a tokenizer would show as two."""
    assert prepare_pairs([DataRow("f:1", fields)], DatasetSpec(path="a.jsonl"), UnknownTokenizer(), 99)


REFUSED = [
    ({"prompt": "1=", "chosen": "1"}, "f:1: field `rejected` is missing; the row has `prompt`, `chosen`"),
    ({"chosen": "1", "rejected": "2"}, "f:1: field `prompt` is missing"),
    ({**TEXT, "chosen": 3}, "f:1: field `chosen` must be text, got a number"),
    ({**TEXT, "chosen": ""}, "f:1: field `chosen` is empty"),
    ({**TEXT, "rejected": "x"}, "f:1: field `rejected`: character 'x' is not in"),
    ({**TEXT, "rejected": "11"}, "fields `chosen` and `rejected` are the same"),
    ({"messages": ASKED, "chosen": [GOOD | {"id": "7"}], "rejected": [GOOD]}, "are the same to the policy"),
    ({"messages": ASKED, "chosen": [GOOD | {"tool_calls": []}], "rejected": [GOOD]}, "are the same to the policy"),
    ({**TEXT, "chosen": "1" * 20}, "f:1: field `chosen`: the row has 24 tokens; rollout.engine.maxContext allows 12"),
    ({**TEXT, "chosen": []}, "f:1: field `chosen` must be a list with at least one message"),
    ({**TEXT, "chosen": [turn("boss", "1")]}, r"f:1: chosen\[0\].role must be one of"),
    ({"chosen": ASKED, "rejected": [*ASKED, BAD]}, "field `chosen`: field `messages`: the assistant's turns are empty"),
    (
        {"chosen": [turn("user", "1="), GOOD], "rejected": [turn("user", "2="), BAD]},
        "must answer the same prompt, both",
    ),
    (
        {**TEXT, "chosen": [GOOD]},
        "f:1: fields `chosen` and `rejected` must answer the same prompt, both as text or both",
    ),
    ({**TEXT, "margin": "much"}, "f:1: field `margin` must be a finite number, .*got 'much'"),
    ({**TEXT, "margin": float("nan")}, "f:1: field `margin` must be a finite number, .*got nan"),
    ({**TEXT, "margin": 1e39}, r"field `margin` must be a finite number, at most 1e\+12 from 0, got 1e\+39"),
    ({**TEXT, "margin": 10**400}, "f:1: field `margin` must be a finite number, .*got 1000"),
    ({**TEXT, "chosen": "1" * 8}, "f:1: an answer has 12 tokens, and its score takes one more; maxContext is 12"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
def test_a_bad_pair_is_refused_at_its_place(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidData, match=sentence):
        pair(fields, prepare_scored_pairs)
