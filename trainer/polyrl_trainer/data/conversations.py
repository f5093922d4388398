"""Rows to supervised samples: tokens, and a loss mask that is 1 on what the assistant wrote and 0 elsewhere.

A row holds `prompt` and `response` (the response is learned, with its end-of-sequence), or `messages` (every
assistant turn is learned, with its end-of-turn).

Refuses: rows longer than the context; a silently cut answer teaches to stop mid-sentence. Read next: `buffer`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from polyrl.errors import InvalidData
from polyrl_trainer.data.rows import DataRow, messages_field, text_field
from polyrl_trainer.data.tokenizers import Tokenizer
from polyrl_trainer.sample import Sample


def prepare_conversations(rows: Iterable[DataRow], tokenizer: Tokenizer, max_tokens: int) -> list[Sample]:
    """Raises InvalidData naming the row."""
    return [prepare_conversation(row, tokenizer, max_tokens) for row in rows]


def prepare_conversation(row: DataRow, tokenizer: Tokenizer, max_tokens: int) -> Sample:
    """Raises InvalidData."""
    sample = _from_messages(row, tokenizer) if "messages" in row.fields else _from_pair(row, tokenizer)
    if sample.length > max_tokens:
        raise row.refuse(f"the row has {sample.length} tokens; rollout.engine.maxContext allows {max_tokens}")
    return sample


def _from_pair(row: DataRow, tokenizer: Tokenizer) -> Sample:
    prompt, response = text_field(row, "prompt"), text_field(row, "response")
    try:
        prompt_ids = tokenizer.encode_prompt(prompt)
        response_ids = [*tokenizer.encode_text(response), tokenizer.eos_id]
    except InvalidData as error:
        raise row.refuse(str(error)) from error
    mask = [0] * len(prompt_ids) + [1] * len(response_ids)
    return _sample(prompt_ids + response_ids, mask, prompt, response)


def _from_messages(row: DataRow, tokenizer: Tokenizer) -> Sample:
    messages = messages_field(row)
    if not any(message["role"] == "assistant" for message in messages):
        raise row.refuse("field `messages` has no assistant turn to learn from")
    try:
        ids, mask = tokenizer.encode_chat(messages)
    except InvalidData as error:
        raise row.refuse(f"field `messages`: {error}") from error
    if not any(mask):
        raise row.refuse("field `messages`: the assistant's turns are empty")
    return _sample(ids, mask, "", messages[-1]["content"])


def _sample(ids: list[int], mask: list[int], prompt: str, response: str) -> Sample:
    loss_mask = np.asarray(mask, dtype=np.float32)
    return Sample(
        tokens=np.asarray(ids, dtype=np.int64),
        loss_mask=loss_mask,
        prompt_length=int(loss_mask.argmax()),
        prompt=prompt,
        response=response,
    )
