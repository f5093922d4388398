"""Rows of any data set as the rows that stages read: columns by other names, and prompts as turns of a conversation.

What a manifest says of a file is done here, once, before anything else looks at its rows; a fault names the user's
own column.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from polyrl.manifest.data import DatasetSpec
from polyrl_trainer.data.rows import DataRow, Message, messages_field, text_field


def prompt_rows(rows: Iterable[DataRow], dataset: DatasetSpec) -> list[DataRow]:
    """Rows to answer: `prompt` or `messages`, and whatever else they hold. Raises InvalidData."""
    return [_mapped(row, dataset, answered=False) for row in rows]


def answered_rows(rows: Iterable[DataRow], dataset: DatasetSpec) -> list[DataRow]:
    """Rows with their answers: `prompt` and `response`, or `messages`. Raises InvalidData."""
    return [_mapped(row, dataset, answered=True) for row in rows]


def rows_digest(rows: Iterable[DataRow], dataset: DatasetSpec) -> str:
    """Hex, 32 characters: the same for the same rows, read the same way; where the file lies does not count."""
    summed = hashlib.blake2b(dataset.model_dump_json(exclude={"path", "weight"}).encode(), digest_size=16)
    for row in rows:
        # Parquet has types of its own, such as decimals.
        summed.update(msgspec.json.encode(row.fields, enc_hook=repr))
    return summed.hexdigest()


def is_chat(row: DataRow, dataset: DatasetSpec) -> bool:
    """Whether the row's prompt goes through the tokenizer's chat template."""
    has_messages = dataset.prompt_field is None and row.fields.get("messages") is not None
    return _makes_chat(dataset) or has_messages or isinstance(row.fields.get(dataset.prompt_field or "prompt"), list)


def _makes_chat(dataset: DatasetSpec) -> bool:
    return dataset.chat or bool(dataset.system_prompt)


def _mapped(row: DataRow, dataset: DatasetSpec, *, answered: bool) -> DataRow:
    fields, asked, written = dict(row.fields), dataset.prompt_field or "prompt", dataset.response_field or "response"
    columns: dict[str, tuple[str, ...]] = {"prompt": (asked,)}
    if dataset.prompt_field is not None or fields.get("messages") is None:
        fields.pop("messages", None)
    if dataset.prompt_field is not None:
        fields["prompt"] = _written(row, dataset.prompt_field)
    if answered and dataset.response_field is not None:
        fields["response"] = _written(row, dataset.response_field)
    unread = row.fields if dataset.prompt_field is not None else None
    mapped = DataRow(row.place, fields, unread=unread, columns=columns)
    if _makes_chat(dataset) or (isinstance(fields.get("prompt"), list) and "messages" not in fields):
        if "messages" not in fields:
            columns["messages"] = (asked, written) if answered else (asked,)
        fields["messages"] = _turns(mapped, dataset.system_prompt, answered=answered)
    return mapped


def _written(row: DataRow, column: str) -> str | list[Message]:
    """Text or, as TRL and verl have it, a list of messages. Raises InvalidData."""
    content = row.fields.get(column)
    if not isinstance(content, list):
        return text_field(row, column)
    return messages_field(DataRow(row.place, {"messages": content}, columns={"messages": (column,)}))


def _by(role: str, content: str | list[Message]) -> list[Message]:
    return content if isinstance(content, list) else [{"role": role, "content": content}]


def _not_learned(turn: Message) -> Message:
    """Answers within a prompt are examples, as TRL has it, unless they have a weight of their own."""
    return {"weight": 0} | turn if turn["role"] == "assistant" else turn


def _turns(row: DataRow, system_prompt: str, *, answered: bool) -> list[Message]:
    if "messages" in row.fields:
        turns = messages_field(row)
    else:
        turns = [_not_learned(turn) for turn in _by("user", _written(row, "prompt"))]
        turns += _by("assistant", _written(row, "response")) if answered else []
    begins_so = turns[0]["role"] == "system" or not system_prompt
    return turns if begins_so else [{"role": "system", "content": system_prompt}, *turns]
