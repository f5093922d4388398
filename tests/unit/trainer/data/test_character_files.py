"""What lies in a model's folder is the tokenizer that it was trained with, whoever loads it."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from polyrl_trainer.data.tokenizers import BOS_ID, EOS_ID, PAD_ID, CharacterTokenizer, HuggingFaceTokenizer

ALPHABETS = {
    "digits": "0123456789>",
    "line ends and spaces": "ab \n\r\t\u00a0",
    "more than one byte, and marks that combine": "é\u0301ß😀\u200d漢",
    "spells the usual special tokens": "<bos>pade",
    "one that only spells one": "<eos>",
    "whatever else has a meaning": "#\ue000▁Ġ<|>_{}\\\"'",
}


@pytest.fixture(params=ALPHABETS.values(), ids=list(ALPHABETS))
def alphabet(request):
    return "".join(dict.fromkeys(request.param))


@pytest.fixture
def ours(alphabet):
    return CharacterTokenizer(alphabet)


@pytest.fixture(params=["qwen2", "llama"])
def folder(request, ours, tmp_path):
    # AutoTokenizer asks the model's config too, and once took an empty tokenizer from its type alone.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": request.param, "vocab_size": ours.vocabulary}))
    ours.save(tmp_path)
    return tmp_path


@pytest.fixture
def theirs(folder):
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_ids_are_the_same(alphabet, ours, theirs):
    for text in (alphabet, alphabet[::-1], alphabet * 3, "<bos>" if set("<bos>") <= set(alphabet) else alphabet[0]):
        assert theirs(text)["input_ids"] == ours.encode_prompt(text)
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode_text(text)
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (PAD_ID, BOS_ID, EOS_ID)
    assert len(theirs) >= ours.vocabulary
    assert len(theirs) == ours.vocabulary or not alphabet.isascii()


def test_text_comes_back(alphabet, ours, theirs):
    ids = [*ours.encode_prompt(alphabet), EOS_ID, PAD_ID]
    assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids) == alphabet


def test_a_chat_is_the_same(alphabet, ours, theirs):
    turns = [{"role": role, "content": alphabet} for role in ("system", "user", "assistant", "user")]
    for messages in (turns, turns[:2]):
        assert theirs.apply_chat_template(messages, tokenize=True)["input_ids"] == ours.encode_chat_prompt(messages)


def test_an_unknown_character_is_refused(folder, theirs):
    if "qwen2" in (folder / "config.json").read_text():
        pytest.skip("transformers makes a pipeline of its own for this architecture, which leaves unknown bytes out")
    with pytest.raises(Exception, match="<unk>"):
        theirs("\u2603")


def test_a_hugging_face_folder_gives_the_same_again(folder, ours, alphabet, tmp_path):
    again = tmp_path / "again"
    again.mkdir()
    HuggingFaceTokenizer(folder).save(again)
    assert HuggingFaceTokenizer(again).encode_prompt(alphabet) == ours.encode_prompt(alphabet)
    assert str(tmp_path) not in "".join(path.read_text() for path in again.iterdir())
