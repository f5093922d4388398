"""Which tokens end a turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import structlog
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from polyrl.errors import InvalidData
from polyrl.manifest.recipe import RecipeSpec
from polyrl_trainer.data.examples import prepare_conversations
from polyrl_trainer.data.rows import DataRow
from polyrl_trainer.data.tokenizers import EOS_ID, CharacterTokenizer, HuggingFaceTokenizer
from polyrl_trainer.preparation import stop_token_ids

WORDS = ["<unk>", "<document_end>", "<turn_end>", "<pad>", "user", "assistant"]
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} <turn_end>\n{% endfor %}"


def folder_of(folder: Path, template: str | None, generation: str | None) -> Path:
    """A base model's tokenizer: its end of sequence is the document's, not the template's."""
    bare = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "eos_token": "<document_end>", "additional_special_tokens": ["<turn_end>"]}
    PreTrainedTokenizerFast(tokenizer_object=bare, chat_template=template, **special).save_pretrained(folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(generation)
    return folder


@pytest.mark.parametrize(
    ("template", "generation", "ends"),
    [
        (None, None, (1,)),
        (TEMPLATE, None, (1, 2)),
        (TEMPLATE.replace("<turn_end>", "assistant"), None, (1,)),
        ("{{ raise_exception('no') }}", None, (1,)),
        (None, json.dumps({"eos_token_id": 3}), (1, 3)),
        (TEMPLATE, json.dumps({"eos_token_id": [1, 3]}), (1, 2, 3)),
        (None, json.dumps({}), (1,)),
    ],
)
def test_tokenizer_template_and_generation_config_each_name_their_end(
    tmp_path: Path, template: str | None, generation: str | None, ends: tuple[int, ...]
) -> None:
    assert HuggingFaceTokenizer(folder_of(tmp_path, template, generation)).end_ids == ends


def test_a_generation_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match=r"generation_config\.json: not a generation config"):
        HuggingFaceTokenizer(folder_of(tmp_path, None, "[1]"))


@pytest.mark.parametrize(
    ("template", "warned"),
    [(TEMPLATE, []), (TEMPLATE.replace(" <turn_end>", ""), [("answers are learned without their end", 2, 2, "f:1")])],
    ids=["an end", "none"],
)
def test_a_chat_template_that_teaches_no_end_is_named(
    tmp_path: Path, template: str, warned: list[tuple[str, int, int, str]]
) -> None:
    tokenizer = HuggingFaceTokenizer(folder_of(tmp_path, template, None))
    messages = [{"role": "user", "content": "user"}, {"role": "assistant", "content": "assistant user"}]
    rows = [DataRow(f"f:{line}", {"messages": messages}) for line in (1, 2)]
    with structlog.testing.capture_logs() as logs:
        assert len(prepare_conversations(rows, tokenizer, 100)) == 2
    assert [(one["event"], one["samples"], one["of"], one["first"]) for one in logs] == warned


def test_the_manifest_adds_its_own() -> None:
    recipe = RecipeSpec.model_validate(
        {"model": {"config": {"model_type": "qwen2"}}, "sampling": {"stop_token_ids": [7, EOS_ID]}}
    )
    assert stop_token_ids(recipe, CharacterTokenizer("ab")) == (EOS_ID, 7)


def test_tokens_that_hold_a_text_are_found(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(folder_of(tmp_path, None, None))
    assert tokenizer.ids_holding("_end") == [1, 2]
    assert tokenizer.ids_holding("nothing") == []


def folder_with_frame(folder: Path, frame: str, **special: str) -> Path:
    """A tokenizer of bytes that puts `frame`'s tokens around a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: index for index, word in enumerate(["<s>", "</s>", *alphabet])}
    bare = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.post_processor = processors.TemplateProcessing(single=frame, special_tokens=[("<s>", 0), ("</s>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="</s>", **special).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("frame", "special", "text", "around"),
    [
        pytest.param("<s> $A", {"bos_token": "<s>"}, "ab", ([0], []), id="begins as its tokenizer begins texts"),
        pytest.param("<s> $A </s>", {"bos_token": "<s>"}, "ab", ([0], []), id="an end that its tokenizer adds is none"),
        pytest.param("$A </s>", {}, "ab</s>", ([], [1]), id="an end that the text itself has stays"),
        pytest.param("</s> $A", {"bos_token": "</s>", "unk_token": "</s>"}, "ab", ([1], []), id="OPT's: begin is unk"),
    ],
)
def test_a_prompt_begins_a_text_and_does_not_end_it(
    tmp_path: Path, frame: str, special: dict[str, str], text: str, around: tuple[list[int], list[int]]
) -> None:
    tokenizer = HuggingFaceTokenizer(folder_with_frame(tmp_path, frame, **special))
    assert tokenizer.encode_prompt(text) == [*around[0], *tokenizer.encode_text("ab"), *around[1]]
