"""The calculator of docs/how-to/write-a-reward.md answers tool calls as the page says, and stops when none is made."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-reward.md"


def calculator() -> Any:
    (block,) = [
        one for one in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "class Calculator" in one
    ]
    names: dict[str, Any] = {}
    exec(block, names)
    return names["Calculator"]()


def call(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def play(*turns: str) -> list[str]:
    """What the environment writes between these turns of the policy."""
    written: list[str] = []
    response = turns[0]

    async def generate(text: str) -> SimpleNamespace:
        nonlocal response
        written.append(text)
        response += text + turns[len(written)]
        return SimpleNamespace(response=response)

    asyncio.run(calculator().run(SimpleNamespace(response=response), generate))
    return written


def test_each_call_is_answered_once_in_the_templates_form() -> None:
    one = call('{"name": "calculator", "arguments": {"expression": "17 * 23"}}')
    two = call('{"name": "calculator", "arguments": {"expression": "391 - 5"}}')
    written = play(f"I compute. {one}{two}", f"And again. {two}", "It is 386.")
    begin, end = "\n<|im_start|>user", "<|im_end|>\n<|im_start|>assistant\n"
    response = "\n<tool_response>\n{}\n</tool_response>"
    assert written == [
        f"{begin}{response.format(391)}{response.format(386)}{end}",
        f"{begin}{response.format(386)}{end}",
    ]


def test_what_is_no_call_reads_an_error_or_ends_the_episode() -> None:
    for text in (
        "17 * 23",
        "[]",
        '{"arguments": {}}',
        '{"arguments": {"expression": 3}}',
        '{"arguments": {"expression": "x"}}',
    ):
        (written,) = play(call(text), "Then I cannot say.")
        assert "<tool_response>\nerror\n</tool_response>" in written
    assert play("It is 386.") == []
