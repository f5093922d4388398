"""Columns by other names and prompts as conversations: what is learned is what rows of ours would have said."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any

import pytest

from polyrl.errors import InvalidData
from polyrl.manifest.data import DatasetSpec
from polyrl_trainer.check.unknown_tokenizer import UnknownTokenizer
from polyrl_trainer.data.columns import answered_rows, is_chat, prompt_rows, rows_digest
from polyrl_trainer.data.examples import prepare_conversation, prepare_finished_groups, prepare_prompts
from polyrl_trainer.data.rows import DataRow
from polyrl_trainer.data.tokenizers import CharacterTokenizer

TOKENIZER = CharacterTokenizer("0123456789=+")
SYSTEM = {"role": "system", "content": "9"}
USER, ASSISTANT = {"role": "user", "content": "1="}, {"role": "assistant", "content": "11"}
RENAMED = {"promptField": "question", "responseField": "solution"}
THEIRS = {"question": "1=", "solution": "11", "level": 3}


def dataset(**fields: object) -> DatasetSpec:
    return DatasetSpec.model_validate({"path": "a.jsonl", **fields})


CASES = [
    # (of the manifest, the row, as a prompt, with its answer)
    ({}, {"prompt": "1=", "response": "11"}, {"prompt": "1="}, {"prompt": "1=", "response": "11"}),
    (RENAMED, THEIRS, {"prompt": "1="}, {"prompt": "1=", "response": "11"}),
    ({"promptField": "question"}, {"question": "1=", "messages": [USER]}, {"prompt": "1="}, None),
    ({"chat": True}, {"prompt": "1=", "response": "11"}, {"messages": [USER]}, {"messages": [USER, ASSISTANT]}),
    (
        {"systemPrompt": "9"},
        {"prompt": "1=", "response": "11"},
        {"messages": [SYSTEM, USER]},
        {"messages": [SYSTEM, USER, ASSISTANT]},
    ),
    ({"systemPrompt": "9"}, {"messages": [USER]}, {"messages": [SYSTEM, USER]}, {"messages": [SYSTEM, USER]}),
    (
        {"systemPrompt": "9"},
        {"messages": [{"role": "system", "content": "8"}, USER]},
        {"messages": [{"role": "system", "content": "8"}, USER]},
        None,
    ),
    (
        {"systemPrompt": "9", **RENAMED},
        THEIRS,
        {"messages": [SYSTEM, USER]},
        {"messages": [SYSTEM, USER, ASSISTANT]},
    ),
    # A prompt that is a list of messages, as TRL and verl have it.
    ({}, {"prompt": [USER], "response": "11"}, {"messages": [USER]}, {"messages": [USER, ASSISTANT]}),
    (
        {"systemPrompt": "9", "responseField": "completion"},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"messages": [SYSTEM, USER]},
        {"messages": [SYSTEM, USER, ASSISTANT]},
    ),
    ({"promptField": "question"}, {"question": [USER], "messages": []}, {"messages": [USER]}, None),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "row", "asked", "answered"), CASES)
def test_a_row_becomes_one_of_ours(
    fields: dict[str, object], row: dict[str, object], asked: dict[str, object], answered: dict[str, object] | None
) -> None:
    spec, given = dataset(**fields), DataRow("f:1", row)
    for wanted, rows in ((asked, prompt_rows), (answered, answered_rows)):
        if wanted is None:
            continue
        (mapped,) = rows([given], spec)
        assert {name: mapped.fields.get(name) for name in wanted} == wanted
        assert ("messages" in mapped.fields) is ("messages" in wanted)
        assert mapped.fields.get("level") == row.get("level"), "what the reward wants to know stays"
    assert given.fields == row
    assert is_chat(given, spec) is ("messages" in asked)


def test_what_is_learned_is_the_answer_after_system_and_question() -> None:
    spec = dataset(systemPrompt="9", **RENAMED)
    (row,) = answered_rows([DataRow("f:1", THEIRS)], spec)
    sample = prepare_conversation(row, TOKENIZER, 20)
    assert TOKENIZER.decode(sample.tokens.tolist()) == "91=11"
    assert sample.loss_mask.tolist() == [0, 0, 0, 0, 1, 1, 1]
    (prompt,) = prepare_prompts(prompt_rows([DataRow("f:1", THEIRS)], spec), TOKENIZER, 20)
    assert TOKENIZER.decode(prompt.ids) == "91="
    assert prompt.text == "1="
    assert prompt.metadata["solution"] == "11"


@pytest.mark.parametrize(
    ("fields", "read"),
    [({"promptField": "question"}, ""), ({}, "messages"), ({"chat": True}, "messages")],
    ids=["a column by name", "messages", "a chat"],
)
def test_a_column_that_is_not_read_reaches_the_reward_whatever_its_name(fields: dict[str, Any], read: str) -> None:
    row = {"question": "1=", "prompt": "2=", "messages": [{"role": "user", "content": "3="}], "level": 1}
    (prompt,) = prepare_prompts(prompt_rows([DataRow("f:1", row)], dataset(**fields)), TOKENIZER, 20)
    assert prompt.metadata == {name: value for name, value in row.items() if name != read}


def test_finished_samples_may_be_conversations() -> None:
    rows = [DataRow(f"f:{number}", {**THEIRS, "reward": float(number), "group": 1}) for number in range(2)]
    spec = dataset(systemPrompt="9", **RENAMED)
    ((first, _),) = prepare_finished_groups(answered_rows(rows, spec), TOKENIZER, 20)
    assert TOKENIZER.decode(first.tokens.tolist()) == "91=11"
    assert first.loss_mask.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert (first.prompt, first.response) == ("1=", "11")


OFFLINE = {"reward": 1.0, "group": "a"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "response": "11"},
        {"prompt": [USER], "response": [ASSISTANT]},
        {"messages": [USER, ASSISTANT]},
    ],
    ids=["a text answers messages", "messages answer messages", "one conversation"],
)
def test_finished_samples_may_come_as_messages(row: dict[str, Any]) -> None:
    rows = answered_rows([DataRow(f"f:{number}", row | OFFLINE) for number in range(2)], dataset())
    ((first, _),) = prepare_finished_groups(rows, TOKENIZER, 20)
    assert TOKENIZER.decode(first.tokens.tolist()) == "1=11"
    assert first.loss_mask.tolist() == [0, 0, 0, 1, 1, 1]
    assert (first.prompt, first.response) == ("1=", "11")
    assert first.metadata == {}


def test_of_a_finished_conversation_only_what_the_assistant_wrote_is_learned() -> None:
    turns = [USER, ASSISTANT, {"role": "user", "content": "2="}, {"role": "assistant", "content": "2"}]
    ((first, _),) = prepare_finished_groups([DataRow("f:1", {"messages": turns} | OFFLINE)] * 2, TOKENIZER, 20)
    learned = prepare_conversation(DataRow("f:1", {"messages": turns}), TOKENIZER, 20).loss_mask
    assert first.loss_mask.tolist() == learned.tolist()
    assert 0 in first.loss_mask[first.prompt_length :]
    assert (first.prompt, first.response) == ("2=", "2")


@pytest.mark.parametrize(
    "between",
    [
        [ASSISTANT, {"role": "tool", "content": "4"}],
        [ASSISTANT],
        [ASSISTANT | {"weight": 0}, {"role": "user", "content": "2="}],
    ],
    ids=["another result of a tool", "several answers in a row", "another question of an environment's"],
)
def test_what_came_after_the_first_answer_tells_no_prompt_from_another(between: list[dict[str, Any]]) -> None:
    turns = [[USER, ASSISTANT], [USER, *between, ASSISTANT]]
    rows = [DataRow(f"f:{number}", {"messages": messages} | OFFLINE) for number, messages in enumerate(turns)]
    ((first, other),) = prepare_finished_groups(rows, TOKENIZER, 30)
    assert first.group == other.group
    assert first.prompt_length == 3


@pytest.mark.parametrize(
    "asked",
    [[{"role": "user", "content": "2="}], [SYSTEM, USER]],
    ids=["the first question is another", "the system's text is another"],
)
def test_of_finished_conversations_all_that_the_first_answer_follows_is_their_prompt(
    asked: list[dict[str, str]],
) -> None:
    again = [ASSISTANT, {"role": "user", "content": "3="}, ASSISTANT]
    turns = [[USER, *again], [*asked, *again]]
    rows = [DataRow(f"f:{number}", {"messages": messages} | OFFLINE) for number, messages in enumerate(turns)]
    with pytest.raises(InvalidData, match="f:1: field `group`: 'a' is that of another prompt at f:0"):
        prepare_finished_groups(rows, TOKENIZER, 30)


FEW_SHOTS = [USER, {"role": "assistant", "content": "1"}]
OTHER = {"role": "user", "content": "2="}


@pytest.mark.parametrize("response", ["22", [{"role": "assistant", "content": "22"}]], ids=["text", "messages"])
def test_of_a_prompt_of_messages_the_answers_in_it_are_not_learned(response: object) -> None:
    """Nor are they with TRL; they were, and with the advantage of what followed them."""
    rows = answered_rows([DataRow("f:1", {"prompt": [*FEW_SHOTS, OTHER], "response": response} | OFFLINE)], dataset())
    ((finished, _),) = prepare_finished_groups(rows * 2, TOKENIZER, 20)
    for sample in (finished, prepare_conversation(rows[0], TOKENIZER, 20)):
        assert TOKENIZER.decode(sample.tokens.tolist()) == "1=12=22"
        assert TOKENIZER.decode(sample.tokens[sample.loss_mask > 0].tolist()) == "22"


def test_an_answer_in_a_prompt_is_learned_where_its_weight_says_so() -> None:
    row = {"prompt": [USER, ASSISTANT | {"weight": 1}, OTHER], "response": "2"}
    sample = prepare_conversation(answered_rows([DataRow("f:1", row)], dataset())[0], TOKENIZER, 20)
    assert TOKENIZER.decode(sample.tokens[sample.loss_mask > 0].tolist()) == "112"


GREETING = {"role": "assistant", "content": "3", "weight": 0}
TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prompt": [*FEW_SHOTS, USER], "response": "1"}, {"prompt": [*FEW_SHOTS, OTHER], "response": "1"}),
        ({"messages": [GREETING, USER, ASSISTANT]}, {"messages": [GREETING, OTHER, ASSISTANT]}),
        ({"messages": [USER, ASSISTANT], "tools": [TOOL]}, {"messages": [USER, ASSISTANT]}),
    ],
    ids=["the last question of a prompt of messages", "the question after a greeting", "the tools"],
)
def test_groups_tell_prompts_apart_by_all_that_was_asked(one: dict[str, Any], other: dict[str, Any]) -> None:
    rows = answered_rows([DataRow(f"f:{n}", row | OFFLINE) for n, row in enumerate([one, other])], dataset())
    with pytest.raises(InvalidData, match="f:1: field `group`: 'a' is that of another prompt at f:0"):
        prepare_finished_groups(rows, UnknownTokenizer(), 30)


def test_groups_tell_prompts_apart_by_the_tokens_that_engines_read() -> None:
    given = {"prompt": "1=", "response": "1", "prompt_length": 2} | OFFLINE
    rows = [DataRow(f"f:{n}", given | {"tokens": [1, 1 + n, 2]}) for n in range(2)]
    with pytest.raises(InvalidData, match="f:1: field `group`: 'a' is that of another prompt at f:0"):
        prepare_finished_groups(rows, TOKENIZER, 20)


def test_a_group_may_know_the_tokens_of_some_samples_only() -> None:
    given = {"prompt": "1=", "response": "1"} | OFFLINE
    tokens = {"tokens": [1, 1, 2], "prompt_length": 2}
    (group,) = prepare_finished_groups(
        [DataRow(f"f:{n}", given | more) for n, more in enumerate([tokens, {}])], TOKENIZER, 20
    )
    assert len(group) == 2


def test_a_finished_conversation_ends_with_the_answer() -> None:
    with pytest.raises(InvalidData, match=r"f:1: field `messages` must end with the assistant's answer"):
        prepare_finished_groups([DataRow("f:1", {"messages": [ASSISTANT, USER]} | OFFLINE)] * 2, TOKENIZER, 20)


@pytest.mark.parametrize(
    ("fields", "row", "sentence"),
    [
        ({"promptField": "question"}, {"prompt": "1="}, "f:7: field `question` is missing; the row has `prompt`"),
        ({"promptField": "question"}, {"question": 1}, "f:7: field `question` must be text, got a number"),
        ({"responseField": "solution"}, {"prompt": "1="}, "f:7: field `solution` is missing"),
        ({"chat": True}, {"prompt": "1="}, "f:7: field `response` is missing"),
        (RENAMED | {"chat": True}, {"question": "1="}, "f:7: field `solution` is missing; the row has `question`$"),
        ({}, {"prompt": [USER], "response": 1}, "f:7: field `response` must be text, got a number"),
        ({}, {"prompt": []}, "f:7: field `prompt` must be a list with at least one message"),
        ({"promptField": "turns"}, {"turns": [{"role": "boss"}]}, r"f:7: turns\[0\].role must be one of system"),
        ({"chat": True}, {"messages": []}, "f:7: field `messages` must be a list with at least one message"),
    ],
)
def test_a_fault_names_the_users_own_column(fields: dict[str, object], row: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidData, match=sentence):
        answered_rows([DataRow("f:7", row)], dataset(**fields))


UNKNOWN = {"question": "x", "solution": "11"}


@pytest.mark.parametrize(
    ("fields", "row", "sentence"),
    [
        ({"promptField": "question"}, UNKNOWN, "f:7: field `question`: character 'x' is not in"),
        ({"promptField": "question", "chat": True}, UNKNOWN, "f:7: field `question`: character 'x' is not in"),
        ({}, {"prompt": [USER, ASSISTANT]}, "f:7: field `prompt` must end before the assistant's turn"),
        ({"chat": True}, {"messages": [USER | {"content": "x"}]}, "f:7: field `messages`: character 'x' is not in"),
    ],
)
def test_so_does_a_fault_of_what_is_asked(fields: dict[str, object], row: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidData, match=sentence):
        prepare_prompts(prompt_rows([DataRow("f:7", row)], dataset(**fields)), TOKENIZER, 20)


def test_a_conversation_is_called_by_the_columns_that_it_is_made_of() -> None:
    (row,) = answered_rows([DataRow("f:7", UNKNOWN)], dataset(chat=True, **RENAMED))
    with pytest.raises(InvalidData, match="f:7: fields `question` and `solution`: character 'x' is not in"):
        prepare_conversation(row, TOKENIZER, 20)


def test_of_a_missing_answer_the_fault_names_only_columns_that_the_file_has() -> None:
    (row,) = answered_rows([DataRow("f:7", {"question": "1="})], dataset(promptField="question"))
    with pytest.raises(InvalidData, match=r"field `response` is missing; the row has `question`$"):
        prepare_conversation(row, TOKENIZER, 20)


ROWS = [DataRow("a.jsonl:1", {"prompt": "1=", "when": date(2026, 1, 1), "much": Decimal("1.5")})]


@pytest.mark.parametrize(
    ("rows", "fields", "same"),
    [
        pytest.param([DataRow("b.jsonl:9", ROWS[0].fields)], {"path": "b.jsonl", "weight": 2}, True, id="elsewhere"),
        pytest.param([DataRow("a.jsonl:1", {**ROWS[0].fields, "prompt": "2="})], {}, False, id="another-prompt"),
        pytest.param([DataRow("a.jsonl:1", {**ROWS[0].fields, "much": Decimal(2)})], {}, False, id="another-answer"),
        pytest.param([*ROWS, *ROWS], {}, False, id="more-rows"),
        pytest.param(ROWS, {"systemPrompt": "be brief"}, False, id="read-otherwise"),
    ],
)
def test_what_tells_rows_from_others(rows, fields, same):
    assert (rows_digest(rows, dataset(**fields)) == rows_digest(ROWS, dataset())) is same
