"""Conversations as texts, with what the assistant wrote of each: all that a chat template does to them is seen here.

What is learned of a turn is what the policy would have to write there: it follows the prompt that the template makes of
the messages before. Most templates only append, and one text holds all turns. Templates of models that think do not:

    Qwen3    an earlier turn loses its `<think>` once the user asks again          a text per such stretch of turns
    R1       every turn loses it, and the prompt itself ends with `<think>`        a text per turn, the thought put back

Refuses what would be lost: a thought that the template writes nowhere, and turns that begin otherwise than asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from polyrl.errors import InvalidData
from polyrl_trainer.data.rows import Message, is_whole

Render: TypeAlias = Callable[[Sequence[Message], bool], str]
"""What a chat template makes of messages; the flag asks for the beginning of the assistant's turn."""
WRITTEN: Final = "written by the assistant"
"""Stands in a template's output where the assistant's words do."""
THINK: Final = "<think>"
THOUGHT_END: Final = "</think>"


@dataclass(frozen=True)
class ChatText:
    """One sequence of a conversation."""

    text: str
    learned: tuple[tuple[int, int], ...]
    """Character ranges that the assistant wrote and that are learned."""


def chat_texts(messages: Sequence[Message], render: Render) -> list[ChatText]:
    """One, or several where the template rewrites earlier turns. Raises InvalidData."""
    texts: list[ChatText] = []
    for turn in (index for index, message in enumerate(messages) if is_learned(message)):
        before, after = _turn(messages[: turn + 1], render)
        learned: tuple[tuple[int, int], ...] = ((len(before), len(after)),)
        if texts and before.startswith(texts[-1].text):
            learned = texts.pop().learned + learned
        texts.append(ChatText(after, learned))
    whole = render(messages, False)
    if not texts or whole.startswith(texts[-1].text):
        texts[-1:] = [ChatText(whole, texts[-1].learned if texts else ())]
    return texts


def with_read_arguments(messages: Sequence[Message]) -> list[Message]:
    """The same messages, the arguments of tool calls as objects where they are JSON texts, as OpenAI has them: most
    templates would write such a text as JSON once more, with all its quotes escaped, or cannot go through it."""
    return [
        message | {"tool_calls": [_read(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _read(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    is_read = isinstance(arguments, dict) and is_whole(arguments)
    return call | {"function": function | {"arguments": arguments}} if is_read else call


def is_learned(message: Message) -> bool:
    """A turn of the assistant's, but one of weight 0."""
    return bool(message["role"] == "assistant" and message.get("weight", 1) == 1)


def _turn(messages: Sequence[Message], render: Render) -> tuple[str, str]:
    """The text up to where the last message begins, and up to its end."""
    if len(messages) == 1:
        raise InvalidData(
            "messages[0] is the assistant's, and no template asks for it; begin with another role's, or give it "
            "`weight: 0`"
        )
    before = render(messages[:-1], True)
    # Templates put a line break after the end-of-turn token, which no engine ever generates.
    after = render(messages, False).rstrip()
    if not after.startswith(before):
        after = _with_thought(messages, render, before)
    thought = _thought_and_answer(messages[-1])[0]
    if thought not in after[len(before) :]:
        raise InvalidData(
            f"the chat template leaves out the thought of messages[{len(messages) - 1}] (reasoning_content, or up to "
            f"{THOUGHT_END}), so it would not be learned; use a template that keeps it"
        )
    return before, after


def _with_thought(messages: Sequence[Message], render: Render, before: str) -> str:
    """The text whose prompt opens the thought that the template drops from what was written."""
    head, _, end = render([*messages[:-1], {**messages[-1], "content": WRITTEN}], False).rpartition(WRITTEN)
    opened = before[len(head) :] if head and before.startswith(head) else ""
    if not opened.rstrip().endswith(THINK):
        raise InvalidData(
            f"the chat template writes messages[{len(messages) - 1}] differently from what it asks for, so no loss "
            "mask can be made; see recipe.model.tokenizer.chatTemplateKwargs"
        )
    thought, answer = _thought_and_answer(messages[-1])
    line = "" if opened.endswith("\n") else "\n"
    return f"{before}{line}{thought}\n{THOUGHT_END}\n\n{answer}{end}".rstrip()


def _thought_and_answer(message: Message) -> tuple[str, str]:
    thought, content = message.get("reasoning_content") or "", message["content"]
    if not thought and THOUGHT_END in content:
        thought, content = content.split(THOUGHT_END, 1)
        thought = thought.split(THINK)[-1]
    return thought.strip("\n"), content.lstrip("\n")
