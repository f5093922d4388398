"""Tokenizers of bytes with the chat templates of two families of models that think."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from polyrl.manifest.recipe import TokenizerSpec
from polyrl_trainer.data.tokenizers import HuggingFaceTokenizer, load_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
MARKS = {
    "r1": ["<｜begin｜>", "<｜end｜>", "<｜User｜>", "<｜Assistant｜>"],
    "qwen3": ["<|endoftext|>", "<|im_end|>", "<|im_start|>"],
}
"""The first begins a text, the second ends one."""


def thinking_tokenizer(family: str, folder: Path, **kwargs: object) -> HuggingFaceTokenizer:
    """As a manifest loads it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    begin, end, *others = MARKS[family]
    template = (TEMPLATES / f"{family}.jinja").read_text()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bare,
        bos_token=begin,
        eos_token=end,
        pad_token=end,
        additional_special_tokens=others,
        chat_template=template,
    )
    fast.save_pretrained(folder)
    spec = TokenizerSpec(path=str(folder), chat_template_kwargs=dict(kwargs) or None)
    tokenizer = load_tokenizer(spec, None, folder)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    return tokenizer


def spelled(tokenizer: HuggingFaceTokenizer, ids: object) -> str:
    """Text with its special tokens."""
    return str(tokenizer._tokenizer.decode(list(ids), skip_special_tokens=False))  # type: ignore[call-overload]
