"""Rows of pairs: two answers to one prompt, of which the one called `chosen` was preferred.

- text: `prompt`, `chosen`, `rejected`; a manifest's `chat` or `systemPrompt` makes turns of them.
- chats: `messages` (or `prompt`, as a list of them) with `chosen` and `rejected` as text or as lists of the messages
  that follow; or both as lists that hold the whole conversation.

What both answers have in common is not learned. A row's `margin`, a number, is by how much a reward model has to score
the chosen answer higher.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from polyrl.manifest.data import DatasetSpec
from polyrl_trainer.data.columns import answered_rows, is_chat
from polyrl_trainer.data.examples import prepare_conversation, what_was_asked
from polyrl_trainer.data.rows import DataRow, Message, is_number, messages_field, text_field
from polyrl_trainer.data.tokenizers import Tokenizer
from polyrl_trainer.sample import MAX_REWARD, REWARD_WORDS, Sample

AnswerPair = tuple[Sample, Sample]
"""The chosen answer to a prompt, and the rejected one."""


def prepare_pairs(
    rows: Iterable[DataRow], dataset: DatasetSpec, tokenizer: Tokenizer, max_tokens: int
) -> list[AnswerPair]:
    """Each answer learned from where the two part. Raises InvalidData naming the row and the field."""
    return [_pair(row, dataset, tokenizer, max_tokens) for row in rows]


def prepare_scored_pairs(
    rows: Iterable[DataRow], dataset: DatasetSpec, tokenizer: Tokenizer, max_tokens: int
) -> list[AnswerPair]:
    """Each answer with one token more, the only learned one, whose value is the answer's score; the chosen one's
    `advantages` hold the margin there. Raises InvalidData naming the row and the field."""
    return [
        (_scored(row, chosen, max_tokens, tokenizer, _margin(row)), _scored(row, rejected, max_tokens, tokenizer, 0.0))
        for row in rows
        for chosen, rejected in [_pair(row, dataset, tokenizer, max_tokens)]
    ]


def pairs_are_chats(row: DataRow, dataset: DatasetSpec) -> bool:
    """Whether the row goes through the tokenizer's chat template."""
    return is_chat(row, dataset) or any(isinstance(row.fields.get(name), list) for name in ("prompt", "chosen"))


def _pair(row: DataRow, dataset: DatasetSpec, tokenizer: Tokenizer, max_tokens: int) -> AnswerPair:
    answers = [_with_answer(row, dataset, name) for name in ("chosen", "rejected")]
    if answers[0].fields == answers[1].fields:
        raise row.refuse("fields `chosen` and `rejected` are the same, so there is nothing to prefer")
    if what_was_asked(answers[0]) != what_was_asked(answers[1]):
        raise row.refuse("fields `chosen` and `rejected` must answer the same prompt, both as text or both as messages")
    if all("messages" in answer.fields for answer in answers):
        shared = _shared_turns(*(answer.fields["messages"] for answer in answers))
        answers = [_not_learned(answer, shared) for answer in answers]
    chosen, rejected = (prepare_conversation(answer, tokenizer, max_tokens) for answer in answers)
    if np.array_equal(chosen.tokens, rejected.tokens):
        raise row.refuse("fields `chosen` and `rejected` are the same to the policy, so there is nothing to prefer")
    return chosen, rejected


def _with_answer(row: DataRow, dataset: DatasetSpec, name: str) -> DataRow:
    """The row as SFT would have it, with the answer of this name; what is wrong is said of that field."""
    place = f"{row.place}: field `{name}`"
    fields = {key: value for key, value in row.fields.items() if key in ("tools", dataset.prompt_field, "prompt")}
    answer, asked = row.fields.get(name), _turns_asked(row, dataset)
    if isinstance(answer, list):
        turns = messages_field(DataRow(row.place, {"messages": answer}, columns={"messages": (name,)}))
        if _follows(turns, asked):
            turns = [
                *(asked or [{"role": "user", "content": text_field(row, dataset.prompt_field or "prompt")}]),
                *turns,
            ]
    else:
        written = text_field(row, name)
        if asked is None:
            text_field(row, dataset.prompt_field or "prompt")
            fields |= {dataset.response_field or "response": written}
            return replace(answered_rows([DataRow(row.place, fields)], dataset)[0], place=place)
        turns = [*asked, {"role": "assistant", "content": written}]
    conversation = DataRow(place, {**fields, "messages": turns})
    return answered_rows([conversation], dataset.model_copy(update={"prompt_field": None, "response_field": None}))[0]


def _follows(turns: list[Message], asked: list[Message] | None) -> bool:
    """Whether an answer's messages are no whole conversation."""
    if turns[0]["role"] in ("assistant", "tool"):
        return True
    return asked is not None and asked[-1]["role"] == "assistant" and turns[0] not in asked


def _turns_asked(row: DataRow, dataset: DatasetSpec) -> list[Message] | None:
    """The conversation before the answers; None where the prompt is text."""
    if dataset.prompt_field is None and row.fields.get("messages") is not None:
        return messages_field(row)
    column = dataset.prompt_field or "prompt"
    asked = row.fields.get(column)
    named = DataRow(row.place, {"messages": asked}, columns={"messages": (column,)})
    return messages_field(named) if isinstance(asked, list) else None


def _shared_turns(chosen: list[Message], rejected: list[Message]) -> int:
    pairs = zip(chosen, rejected, strict=False)
    return next((number for number, (one, other) in enumerate(pairs) if one != other), min(len(chosen), len(rejected)))


def _not_learned(row: DataRow, shared: int) -> DataRow:
    turns = row.fields["messages"]
    return replace(
        row, fields={**row.fields, "messages": [{**turn, "weight": 0} for turn in turns[:shared]] + turns[shared:]}
    )


def _scored(row: DataRow, sample: Sample, max_tokens: int, tokenizer: Tokenizer, margin: float) -> Sample:
    """transformers scores the last token that is no padding, so nothing that is stands at the end."""
    padding = tokenizer.eos_id if tokenizer.pad_id is None else tokenizer.pad_id
    last = int(np.flatnonzero(sample.tokens != padding)[-1])
    tokens = np.append(sample.tokens[: last + 1], padding)
    if len(tokens) > max_tokens:
        raise row.refuse(f"an answer has {last + 1} tokens, and its score takes one more; maxContext is {max_tokens}")
    at_end = (np.arange(len(tokens)) == last + 1).astype(np.float32)
    return replace(sample, tokens=tokens, loss_mask=at_end, prompt_length=last + 1, advantages=margin * at_end)


def _margin(row: DataRow) -> float:
    margin = row.fields.get("margin")
    if margin is None:
        return 0.0
    if not is_number(margin, MAX_REWARD):
        raise row.refuse(f"field `margin` must be {REWARD_WORDS}, got {margin!r:.80}")
    return float(margin)
