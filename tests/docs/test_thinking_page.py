"""docs/how-to/train-models-that-think.md: its row and its environment do what the page says, in both families."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyrl_trainer.data.examples import prepare_conversations, prepare_prompts
from polyrl_trainer.data.rows import DataRow
from tests.unit.trainer.data.thinking_tokenizers import spelled, thinking_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "train-models-that-think.md"
FAMILIES = {"qwen3": "QWEN3", "r1": "R1"}
WRITTEN = {"qwen3": "<think>\nOne.\n</think>\n\n2<|im_end|>", "r1": "One.\n</think>\n\n2<｜end｜>"}
"""What the policy writes in its first turn, with its end."""


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_row_is_two_sequences_with_a_thought_each(family: str, tmp_path: Path) -> None:
    tokenizer = thinking_tokenizer(family, tmp_path)
    samples = prepare_conversations([DataRow("f:1", json.loads(block("json")))], tokenizer, 1000)
    learned = [spelled(tokenizer, one.tokens[one.loss_mask == 1]) for one in samples]
    assert [("One and one." in one, "Two and two." in one) for one in learned] == [(True, False), (False, True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_environment_writes_is_what_the_template_would_and_the_thought_stays(
    family: str, tmp_path: Path
) -> None:
    tokenizer = thinking_tokenizer(family, tmp_path)
    names: dict[str, Any] = {}
    exec(block("python"), names)
    environment, extended = names["AskAgain"](), []
    environment.turn = names[FAMILIES[family]]

    async def generate(text: str) -> SimpleNamespace:
        extended.append(text)
        return SimpleNamespace(response=text)

    asyncio.run(environment.run(SimpleNamespace(response=WRITTEN[family]), generate))
    question, again = {"role": "user", "content": "1+1?"}, {"role": "user", "content": "Are you sure?"}
    rows = [DataRow("f:1", {"messages": turns}) for turns in ([question], [question, _answer("2"), again])]
    first, rendered = (one.ids for one in prepare_prompts(rows, tokenizer, 1000))
    sequence = [*first, *tokenizer.encode_text(WRITTEN[family]), *tokenizer.encode_text(extended[0])]
    # The template's own text, but for the thought that it drops.
    thought = WRITTEN[family].removesuffix("2<|im_end|>").removesuffix("2<｜end｜>")
    opened = "<think>\n" if family == "r1" else ""
    assert spelled(tokenizer, sequence).replace(opened + thought, "", 1) == spelled(tokenizer, rendered)
    assert spelled(tokenizer, sequence).count("One.") == 1


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
