"""Chats of models that think: what is learned is what the policy would write after the prompt that it gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from polyrl.errors import InvalidData
from polyrl_trainer.data.examples import (
    prepare_conversation,
    prepare_conversations,
    prepare_finished_groups,
    prepare_prompts,
)
from polyrl_trainer.data.rows import DataRow
from polyrl_trainer.data.tokenizers import HuggingFaceTokenizer
from tests.unit.trainer.data.thinking_tokenizers import spelled, thinking_tokenizer


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, thought: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "reasoning_content": thought, **fields}


TWO = [user("1+1?"), assistant("2", "one and one"), user("2+2?"), assistant("4", "two and two")]


def learned(tokenizer: HuggingFaceTokenizer, messages: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Of each sequence its text, and the pieces of it that are learned."""
    samples = prepare_conversations([DataRow("f:1", {"messages": messages})], tokenizer, 1000)
    found = []
    for sample in samples:
        mask = sample.loss_mask.astype(bool)
        edges = [place for place in range(1, len(mask)) if mask[place] != mask[place - 1]] + [len(mask)]
        starts = [place for place in edges[:-1] if mask[place]]
        pieces = [spelled(tokenizer, sample.tokens[start : edges[edges.index(start) + 1]]) for start in starts]
        found.append((spelled(tokenizer, sample.tokens), pieces))
    return found


def prompt(tokenizer: HuggingFaceTokenizer, messages: list[dict[str, Any]]) -> str:
    (made,) = prepare_prompts([DataRow("f:1", {"messages": messages})], tokenizer, 1000)
    return spelled(tokenizer, made.ids)


@pytest.mark.parametrize("inline", [False, True], ids=["reasoning_content", "in content"])
def test_r1_each_turn_is_learned_with_its_thought_after_the_prompt_that_opens_it(tmp_path: Path, inline: bool) -> None:
    tokenizer = thinking_tokenizer("r1", tmp_path)
    turns = TWO
    if inline:
        turns = [*TWO]
        turns[1] = assistant("<think>\none and one\n</think>\n\n2")
        turns[3] = assistant("two and two\n</think>\n\n4")  # as the policy writes it
    first, second = learned(tokenizer, turns)
    assert first[1] == ["one and one\n</think>\n\n2<｜end｜>"]
    assert second[1] == ["two and two\n</think>\n\n4<｜end｜>"]
    assert first[0] == prompt(tokenizer, TWO[:1]) + first[1][0]
    assert second[0] == prompt(tokenizer, turns[:3]) + second[1][0]
    assert "one and one" not in second[0], "nor has the policy's prompt the earlier thought"


def test_r1_an_answer_without_a_thought_ends_an_empty_one(tmp_path: Path) -> None:
    tokenizer = thinking_tokenizer("r1", tmp_path)
    assert learned(tokenizer, [user("1+1?"), assistant("2")])[0][1] == ["\n</think>\n\n2<｜end｜>"]


def double_line_ends(folder: Path) -> HuggingFaceTokenizer:
    """R1's form of template, with one token for two line ends, as the vocabularies of Qwen, Llama 3 and R1 have it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate([*letters, "ĊĊ"])}
    made = Tokenizer(models.BPE(words, [("Ċ", "Ċ")]))
    lines = pre_tokenizers.Split(Regex(r"\s*[\r\n]+"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [lines, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    special = ["<U>", "<A>", "<think>", "</think>"]
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", additional_special_tokens=special)
    fast.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}{% else %}"
        "<A>{{ m.content.split('</think>')[-1] }}<eos>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<A><think>\n{% endif %}"
    )
    fast.save_pretrained(folder)
    return HuggingFaceTokenizer(folder)


@pytest.mark.parametrize("answers", [["4"], ["two and two</think>4"], ["4", "5"], ["a</think>4", "5", "b</think>6"]])
def test_what_is_learned_begins_where_the_policys_prompt_ends_token_for_token(
    tmp_path: Path, answers: list[str]
) -> None:
    """The last line end of the prompt and the first of an empty thought were one token, which was not learned."""
    tokenizer = double_line_ends(tmp_path)
    messages = [turn for answer in answers for turn in (user("2+2?"), assistant(answer))]
    sequences = tokenizer.encode_chats(messages)
    assert len(sequences) == len(answers)
    for number, (ids, mask) in enumerate(sequences):
        asked = tokenizer.encode_chat_prompt(messages[: 2 * number + 1])
        first = mask.index(1)
        assert ids[:first] == asked
        assert all(mask[first:])


def test_qwen3_a_question_after_an_answer_begins_another_sequence(tmp_path: Path) -> None:
    tokenizer = thinking_tokenizer("qwen3", tmp_path)
    first, second = learned(tokenizer, TWO)
    assert first[1] == ["<think>\none and one\n</think>\n\n2<|im_end|>"]
    assert second[1] == ["<think>\ntwo and two\n</think>\n\n4<|im_end|>"]
    assert second[0].startswith(prompt(tokenizer, TWO[:3]))
    assert "one and one" not in second[0]


CALLS = [
    user("17*23?"),
    assistant("", "a tool", tool_calls=[{"name": "times"}]),
    {"role": "tool", "content": "391"},
    assistant("391", "so it is"),
]


def test_qwen3_steps_with_a_tool_are_one_sequence(tmp_path: Path) -> None:
    tokenizer = thinking_tokenizer("qwen3", tmp_path)
    ((text, pieces),) = learned(tokenizer, CALLS)
    assert len(pieces) == 2
    assert pieces[0].startswith("<think>\na tool\n</think>\n\n\n<tool_call>")
    assert pieces[1] == "<think>\nso it is\n</think>\n\n391<|im_end|>"
    assert "<tool_response>\n391\n</tool_response>" in text
    assert text.endswith("391<|im_end|>\n"), "as the template ends it"


def test_a_turn_of_weight_0_is_neither_learned_nor_a_sequence(tmp_path: Path) -> None:
    for family in ("r1", "qwen3"):
        tokenizer = thinking_tokenizer(family, tmp_path / family)
        turns = [TWO[0], {**TWO[1], "weight": 0}, *TWO[2:]]
        ((text, pieces),) = learned(tokenizer, turns)
        assert len(pieces) == 1
        assert text.rstrip() == prompt(tokenizer, TWO[:3]) + pieces[0]


def test_thinking_is_switched_off_by_the_manifest_and_stays_off_in_what_is_saved(tmp_path: Path) -> None:
    tokenizer = thinking_tokenizer("qwen3", tmp_path, enable_thinking=False)
    asked = prompt(tokenizer, [user("1+1?")])
    assert asked.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert learned(tokenizer, [user("1+1?"), assistant("2")])[0][1] == ["2<|im_end|>"]
    tokenizer.save(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved.apply_chat_template([user("1+1?")], tokenize=False, add_generation_prompt=True) == asked


def test_a_template_reads_whatever_the_manifest_gives_it(tmp_path: Path) -> None:
    given = {"flag": True, "nothing": None, "text": "it's {{ 'é' }}", "list": [1, {"a": 2.5}]}
    tokenizer = thinking_tokenizer("qwen3", tmp_path / "a", **given)
    tokenizer._tokenizer.chat_template += "{{ [flag, nothing, text, list] }}"
    assert tokenizer._render([user("?")], (), generation_prompt=False).endswith(str(list(given.values())))
    with pytest.raises(InvalidData, match="'a b' is no name"):
        thinking_tokenizer("qwen3", tmp_path / "b", **{"a b": 1})


def test_each_of_several_templates_has_what_it_reads(tmp_path: Path) -> None:
    """Some models have one for tools beside their usual one."""
    fast = thinking_tokenizer("qwen3", tmp_path)._tokenizer
    fast.chat_template = {"default": fast.chat_template, "tool_use": "Tools" + fast.chat_template}
    fast.save_pretrained(tmp_path)
    tokenizer = HuggingFaceTokenizer(tmp_path, template_kwargs={"enable_thinking": False})
    add = {"type": "function", "function": {"name": "add"}}
    for tools, begin in (([], "<|im_start|>"), ([add], "Tools")):
        prompt = spelled(tokenizer, tokenizer.encode_chat_prompt(TWO[:1], tools))
        assert prompt.startswith(begin)
        assert prompt.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("family", "kwargs", "messages", "sentence"),
    [
        ("qwen3", {"enable_thinking": False}, TWO[:2], r"writes messages\[1\] differently .*\.chatTemplateKwargs"),
        ("plain", {}, TWO[:2], r"leaves out the thought of messages\[1\]"),
        ("qwen3", {}, [user("?"), assistant("2", 5)], r"messages\[1\]\.reasoning_content must be text, got a number"),  # type: ignore[arg-type]
    ],
    ids=["a thought where none is asked for", "a template that knows no thoughts", "no text"],
)
def test_what_would_be_lost_is_refused(
    tmp_path: Path, family: str, kwargs: dict[str, Any], messages: list[dict[str, Any]], sentence: str
) -> None:
    tokenizer = thinking_tokenizer("qwen3" if family == "plain" else family, tmp_path, **kwargs)
    if family == "plain":
        tokenizer._tokenizer.chat_template = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
    with pytest.raises(InvalidData, match=sentence):
        prepare_conversations([DataRow("f:1", {"messages": messages})], tokenizer, 1000)


def test_of_many_turns_no_text_is_read_once_per_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand turns that each begin with a line end took minutes, and ended with Python's limit of recursion."""
    tokenizer, turns = double_line_ends(tmp_path), 300
    asked, answer = "<U>q<A>\n", "\nx<eos>"
    width, text = len(asked + answer), (asked + answer) * turns
    learned = [(start + len(asked), start + width) for start in range(0, len(text), width)]
    inner, read = tokenizer._tokenizer, []

    def counted(part: str, **kwargs: object) -> object:
        read.append(len(part))
        return inner(part, **kwargs)

    monkeypatch.setattr(tokenizer, "_tokenizer", counted)
    ids, mask = tokenizer._masked(text, learned)
    assert sum(read) <= 2 * len(text)
    each = [inner(part)["input_ids"] for part in (asked, answer)]
    assert ids == [*each[0], *each[1]] * turns
    assert mask == [*[0] * len(each[0]), *[1] * len(each[1])] * turns


def test_a_finished_conversation_ends_where_the_policys_last_answer_does(tmp_path: Path) -> None:
    """Templates put a line end behind it, of which no engine has a log-probability."""
    tokenizer = thinking_tokenizer("qwen3", tmp_path)
    messages = [user("2+2?"), assistant("4")]
    asked = tokenizer.encode_chat_prompt(messages[:1])
    drawn = tokenizer.encode_text("<think>\n\n</think>\n\n4<|im_end|>")
    row = {"messages": messages, "reward": 1.0, "group": 1, "rollout_log_probs": [-1.0] * len(drawn)}
    ((first, _),) = prepare_finished_groups([DataRow("f:1", row)] * 2, tokenizer, 1000)
    assert first.tokens.tolist() == [*asked, *drawn]
    assert first.rollout_log_probs is not None
    assert first.rollout_log_probs.tolist() == [0.0] * len(asked) + [-1.0] * len(drawn)


def test_where_one_sequence_is_needed_several_are_refused(tmp_path: Path) -> None:
    tokenizer = thinking_tokenizer("qwen3", tmp_path)
    with pytest.raises(InvalidData, match="give all but the last `weight: 0`"):
        prepare_conversation(DataRow("f:1", {"messages": TWO}), tokenizer, 1000)
