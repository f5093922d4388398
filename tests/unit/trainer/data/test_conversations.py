"""Supervised samples: what the assistant wrote is learned, with its end, and nothing else is."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from polyrl.errors import InvalidData
from polyrl.manifest.data import DatasetSpec
from polyrl_trainer.data.chats import with_read_arguments
from polyrl_trainer.data.columns import answered_rows
from polyrl_trainer.data.examples import prepare_conversation, prepare_finished_groups, prepare_prompts
from polyrl_trainer.data.rows import DataRow
from polyrl_trainer.data.tokenizers import BOS_ID, EOS_ID, CharacterTokenizer, HuggingFaceTokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.name }} {% endfor %}"
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% for call in m.tool_calls or [] %}{{ call.name }} "
    "{% endfor %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
WORDS = ["<unk>", "<end>", "<user>", "<assistant>", "one", "two", "three"]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A Hugging Face tokenizer folder over whole words, with a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    bare = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="<unk>", eos_token="<end>", chat_template=TEMPLATE)
    fast.save_pretrained(folder)
    return HuggingFaceTokenizer(folder)


def test_without_a_chat_template_the_fault_names_what_asks_for_one(tmp_path):
    bare = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))
    PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<end>").save_pretrained(tmp_path)
    with pytest.raises(
        InvalidData, match="no chat template, as messages, `chat` and `systemPrompt` need; give `prompt`"
    ):
        HuggingFaceTokenizer(tmp_path).encode_chat_prompt([{"role": "user", "content": "0"}])


def test_a_pair_is_learned_from_its_response_on():
    tokenizer = CharacterTokenizer("0123456789=")
    sample = prepare_conversation(DataRow("f:1", {"prompt": "21=", "response": "12"}), tokenizer, 20)
    assert sample.tokens.tolist() == [BOS_ID, 5, 4, 13, 4, 5, EOS_ID]
    assert sample.loss_mask.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert sample.prompt_length == 4
    assert tokenizer.decode(sample.tokens.tolist()) == "21=12"


def test_all_assistant_turns_are_learned_and_no_others(words):
    turns = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "one two")]
    row = DataRow("f:1", {"messages": [{"role": role, "content": content} for role, content in turns]})
    sample = prepare_conversation(row, words, 100)
    learned = [WORDS[token] for token, mask in zip(sample.tokens, sample.loss_mask, strict=True) if mask]
    assert learned == ["two", "<end>", "one", "two", "<end>"]
    assert words.decode(sample.tokens.tolist()).split() == [
        "<user>",
        "one",
        "<assistant>",
        "two",
        "<user>",
        "three",
        "<assistant>",
        "one",
        "two",
    ]


ARGUMENTS = {
    "as JSON": ("{{ call.function.arguments | tojson }}", '{"one": "two"}'),
    "one by one": ("{% for k, v in call.function.arguments | items %}{{ k }}={{ v }}{% endfor %}", "one=two"),
    "as text": ("{{ '' + call.function.arguments }}", '{"one":"two"}'),
}


@pytest.mark.parametrize(("template", "written"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_of_a_call_are_written_as_the_template_means_them(words, monkeypatch, template, written):
    calls = f"{{% for m in messages %}}{{% for call in m.tool_calls or [] %}}{template}{{% endfor %}}{{% endfor %}}"
    monkeypatch.setattr(words._tokenizer, "chat_template", calls)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"one":"two"}'}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert words._render([message], (), generation_prompt=False) == written
    assert call["function"]["arguments"] == '{"one":"two"}', "the row stays as it is"


def test_a_template_that_cannot_read_a_call_is_refused_in_a_sentence(words, monkeypatch):
    monkeypatch.setattr(
        words._tokenizer, "chat_template", "{% for k, v in messages[0].tool_calls | items %}{% endfor %}"
    )
    message = {"role": "assistant", "content": "", "tool_calls": [{"name": "two"}]}
    with pytest.raises(InvalidData, match="the chat template refuses the conversation: Can only get item pairs"):
        words._render([message], (), generation_prompt=False)


WEIGHED = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two", "weight": 0},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "two"}], "weight": None},
]


def test_a_turn_of_weight_0_is_not_learned_and_a_call_of_a_tool_is(words):
    sample = prepare_conversation(DataRow("f:1", {"messages": WEIGHED}), words, 100)
    learned = [WORDS[token] for token, mask in zip(sample.tokens, sample.loss_mask, strict=True) if mask]
    assert learned == ["two", "<end>"]
    assert words.decode(sample.tokens.tolist()) == "<user> one <assistant> two <user> three <assistant> two"
    characters = CharacterTokenizer("abc")
    turns = [{"role": "assistant", "content": "ab", "weight": 0}, {"role": "assistant", "content": "c"}]
    sample = prepare_conversation(DataRow("f:1", {"messages": turns}), characters, 100)
    assert sample.loss_mask.tolist() == [0, 0, 0, 0, 1, 1]


def test_the_template_shows_a_rows_tools(words):
    row = {"messages": WEIGHED[:1], "tools": [{"name": "three"}, {"name": "two"}]}
    (prompt,) = prepare_prompts([DataRow("f:1", row)], words, 100)
    assert words.decode(prompt.ids).split() == ["three", "two", "<user>", "one", "<assistant>"]
    assert prompt.metadata == {"tools": row["tools"]}
    sample = prepare_conversation(DataRow("f:1", row | {"messages": WEIGHED}), words, 100)
    assert words.decode(sample.tokens.tolist()).split()[:3] == ["three", "two", "<user>"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"messages": WEIGHED[:2]}, "all have weight 0"),
        ({"messages": [WEIGHED[1] | {"weight": 0.5}]}, r"messages\[0\].weight must be 0 \(not learned\) or 1, got 0.5"),
        ({"messages": WEIGHED, "tools": "two"}, "^f:1: field `tools` must be a list of objects"),
        ({"messages": [{"role": "assistant"}]}, r"messages\[0\].content must be text, got null"),
    ],
)
def test_weights_and_tools_that_cannot_be_read_are_refused(words, fields, sentence):
    with pytest.raises(InvalidData, match=sentence):
        prepare_conversation(DataRow("f:1", fields), words, 100)


def test_half_a_pair_in_a_calls_arguments_stays_as_it_was_written(words):
    """Of arguments that are a JSON text it is an escape until they are read: no tokenizer takes it, and none did."""
    call = {"function": {"name": "two", "arguments": '{"a": "\\ud83d"}'}}
    assert with_read_arguments([{"role": "assistant", "tool_calls": [call]}])[0]["tool_calls"] == [call]


def test_a_conversation_that_begins_with_what_is_learned_is_refused(words):
    """As ShareGPT's often do; a template cannot ask for an answer to nothing."""
    row = {"messages": [{"role": "assistant", "content": "one"}, *WEIGHED]}
    with pytest.raises(InvalidData, match=r"f:1: field `messages`: messages\[0\] is the assistant's, .* `weight: 0`"):
        prepare_conversation(DataRow("f:1", row), words, 100)
    row["messages"][0]["weight"] = 0
    assert words.decode(prepare_conversation(DataRow("f:1", row), words, 100).tokens.tolist()).startswith(
        "<assistant> one"
    )


@pytest.mark.parametrize("beside", [False, True], ids=["by itself", "beside another"])
def test_a_prompt_that_ends_with_a_space_keeps_it_whatever_places_a_tokenizer_gives(tmp_path, beside):
    """Pythia's and its kin say of ` two` that it begins at the `t`: it was learned where the policy writes `two`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, "tw", "two", "Ġtwo"])}
    bare = Tokenizer(models.BPE(vocabulary, [("t", "w"), ("tw", "o"), ("Ġ", "two")]))
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trimmed = processors.ByteLevel(trim_offsets=True)
    bare.post_processor = processors.Sequence([trimmed]) if beside else trimmed
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<end>", chat_template=template).save_pretrained(tmp_path)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    row = DataRow("f:1", {"messages": [*WEIGHED[:1], {"role": "assistant", "content": "two"}]})
    sample = prepare_conversation(row, tokenizer, 100)
    assert sample.tokens[: sample.prompt_length].tolist() == tokenizer.encode_chat_prompt(WEIGHED[:1])
    assert tokenizer.decode(sample.tokens[sample.prompt_length :].tolist()) == "two"
    tokenizer.save(tmp_path / "saved")
    kept = [json.loads((folder / "tokenizer.json").read_bytes()) for folder in (tmp_path, tmp_path / "saved")]
    assert kept[1]["post_processor"] == kept[0]["post_processor"], "whoever uses the saved model has the places it had"
    assert prepare_conversation(row, tokenizer, 100).tokens.tolist() == sample.tokens.tolist()


def test_a_chat_prompt_ends_where_the_assistant_begins(words):
    ids = words.encode_chat_prompt([{"role": "user", "content": "one"}])
    assert [WORDS[token] for token in ids] == ["<user>", "one", "<end>", "<assistant>"]


def test_unknown_words_are_refused(words):
    with pytest.raises(InvalidData, match=r"f:3: .*does not know"):
        prepare_conversation(DataRow("f:3", {"prompt": "one", "response": "seven"}), words, 100)


@pytest.mark.parametrize("contents", [("seven", "one"), ("one", "seven")], ids=["the user's", "the assistant's"])
def test_unknown_words_of_a_conversation_are_refused(words, contents):
    """They were learned as the token that stands for all that is unknown."""
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), contents, strict=True)]
    with pytest.raises(InvalidData, match=r"f:3: field `messages`: .*does not know"):
        prepare_conversation(DataRow("f:3", {"messages": turns}), words, 100)


def test_finished_samples_are_grouped_and_masked():
    rows = [
        DataRow(f"f:{line}", {"prompt": "1=", "response": "1", "reward": float(line), "group": name, "level": 3})
        for line, name in enumerate("abab")
    ]
    groups = prepare_finished_groups(rows, CharacterTokenizer("1="), 20)
    assert [[one.reward for one in group] for group in groups] == [[0.0, 2.0], [1.0, 3.0]]
    assert [one.group for group in groups for one in group] == [0, 0, 1, 1]
    assert groups[0][0].loss_mask.tolist() == [0, 0, 0, 1, 1]
    assert groups[0][0].metadata == {"level": 3}


@pytest.mark.parametrize("name", ["tokens", "rollout_log_probs", "messages", "tools"])
def test_null_is_no_value_where_a_column_is_another_rows(name):
    """Parquet gives each row every column."""
    rows = [DataRow("f:1", {"prompt": "1=", "response": "1", "reward": 0.0, "group": "a", name: None})] * 2
    ((first, _),) = prepare_finished_groups(answered_rows(rows, DatasetSpec(path="f")), CharacterTokenizer("1="), 20)
    assert first.tokens.tolist() == [BOS_ID, 3, 4, 3, EOS_ID]


def test_a_sample_that_ended_at_once_has_a_token_and_no_text():
    row = {"prompt": "1=", "reward": 0.0, "group": "a", "tokens": [0, 1, 2], "prompt_length": 2}
    rows = [DataRow(f"f:{line}", {**row, "response": text}) for line, text in enumerate(["", "1"])]
    ((ended, _),) = prepare_finished_groups(rows, CharacterTokenizer("1="), 20)
    assert (ended.response, ended.loss_mask.tolist()) == ("", [0, 0, 1])
