"""A character tokenizer as the files that transformers' AutoTokenizer, SGLang and others load; ids are exactly ours.

tokenizer.json         byte pairs whose merges make one token of each character, and nothing longer
tokenizer_config.json  names of the special tokens
chat_template.jinja    a chat is its contents in a row, an end-of-sequence after each of the assistant's

Byte pairs, although single words would do: for some architectures (qwen2) transformers makes its own byte-level
pipeline from a folder's vocabulary, whatever the folder says, and dropped every space and accent of a word-level one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL: Final = ("pad", "bos", "eos")
"""In the order of their ids, which begin at 0."""

PRIVATE_USE: Final = range(0xE000, 0xF900)
"""More code points than an alphabet may have characters."""

ANY_CHARACTER: Final = r"[\s\S]"
"""A dot would leave line ends out."""

BYTES: Final = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
"""Writes each byte of UTF-8 as one printable character."""

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def tokenizer_files(alphabet: str) -> dict[str, str]:
    """File name to content."""
    special = special_names(alphabet)
    config = {
        # Older readers know no other name of this class, newer ones know this one too.
        "tokenizer_class": "PreTrainedTokenizerFast",
        # Else some classes add one of their own, with an id that no model has.
        "unk_token": special[0],
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        **{f"{role}_token": name for role, name in zip(SPECIAL, special, strict=True)},
    }
    return {
        "tokenizer.json": _tokenizer(alphabet, special).to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False),
        "chat_template.jinja": CHAT_TEMPLATE,
    }


def special_names(alphabet: str) -> list[str]:
    """Names that no text over this alphabet can spell: one that could would be read as a token of its own."""
    usual = [f"<{role}>" for role in SPECIAL]
    if not any(set(name) <= set(alphabet) for name in usual):
        return usual
    mark = next(chr(code) for code in PRIVATE_USE if chr(code) not in alphabet)
    return [f"{mark}{role}{mark}" for role in SPECIAL]


def _tokenizer(alphabet: str, special: Sequence[str]) -> Tokenizer:
    ids, merges = _byte_pairs(alphabet, special)
    # An unknown token that the vocabulary lacks: a character outside the alphabet is an error, never a token.
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>"))
    tokenizer.add_special_tokens(list(special))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(ANY_CHARACTER), "isolated"), BYTES])
    tokenizer.decoder = decoders.ByteLevel()
    bos = special[SPECIAL.index("bos")]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, ids[bos])])
    return tokenizer


def _byte_pairs(alphabet: str, special: Sequence[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Ids and merges. Bytes of a character that has several get ids behind all others, which no text leads to."""
    characters = [BYTES.pre_tokenize_str(character)[0][0] for character in alphabet]
    merges = {(one[:end], one[end]): None for one in characters for end in range(1, len(one))}
    parts = {part: None for merge in merges for part in merge}
    return {token: index for index, token in enumerate(dict.fromkeys([*special, *characters, *parts]))}, list(merges)
