"""Rows to prompts: what a policy is asked in RL and in evaluation.

A row holds `prompt` (plain text, taken as it is) or `messages` (through the tokenizer's chat template, ending where
the assistant begins). All further fields reach the reward function as `sample.metadata`.

Refuses: prompts that leave no room for an answer; a policy that never could answer would only look stupid.
Read next: `buffer`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from polyrl.errors import InvalidData
from polyrl_trainer.data.rows import DataRow, messages_field, text_field
from polyrl_trainer.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """One question, ready to submit."""

    place: str
    """`FILE:LINE` it came from."""
    text: str
    ids: tuple[int, ...]
    metadata: dict[str, Any]


def prepare_prompts(rows: Iterable[DataRow], tokenizer: Tokenizer, max_prompt_tokens: int) -> list[Prompt]:
    """Raises InvalidData naming the row whose prompt is missing, malformed, unknown to the tokenizer or too long."""
    return [prepare_prompt(row, tokenizer, max_prompt_tokens) for row in rows]


def prepare_prompt(row: DataRow, tokenizer: Tokenizer, max_prompt_tokens: int) -> Prompt:
    """Raises InvalidData."""
    text, ids = _chat_prompt(row, tokenizer) if "messages" in row.fields else _plain_prompt(row, tokenizer)
    if len(ids) > max_prompt_tokens:
        raise row.refuse(
            f"the prompt has {len(ids)} tokens; at most {max_prompt_tokens} leave room for "
            "recipe.sampling.maxNewTokens in rollout.engine.maxContext"
        )
    metadata = {name: value for name, value in row.fields.items() if name not in ("prompt", "messages")}
    return Prompt(row.place, text, tuple(ids), metadata)


def _plain_prompt(row: DataRow, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    text = text_field(row, "prompt")
    try:
        return text, tokenizer.encode_prompt(text)
    except InvalidData as error:
        raise row.refuse(f"field `prompt`: {error}") from error


def _chat_prompt(row: DataRow, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    messages = messages_field(row)
    if messages[-1]["role"] == "assistant":
        raise row.refuse("field `messages` must end before the assistant's turn, which the policy writes")
    try:
        return messages[-1]["content"], tokenizer.encode_chat_prompt(messages)
    except InvalidData as error:
        raise row.refuse(f"field `messages`: {error}") from error
