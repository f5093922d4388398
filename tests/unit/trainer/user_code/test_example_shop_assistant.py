"""examples/shop-assistant: the shop answers what it is asked, and nothing but the right price is worth anything."""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import yaml

from polyrl_trainer.sample import Sample

EXAMPLE = Path(__file__).parents[4] / "examples" / "shop-assistant"
SHOP = {"fig": "h", "nut": "a", "h": "98", "a": "41"}
PRICE_DIGITS = re.compile(r"[1-9]\d")


def load(name: str) -> ModuleType:
    """Under a name of its own: other examples have a module `reward` too."""
    spec = importlib.util.spec_from_file_location(f"shop_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


environment, reward, make_data = (load(name) for name in ("environment", "reward", "make_data"))


def sample(response: str, prompt: str = "fig>", shop: dict[str, str] | None = None) -> Sample:
    nothing = np.zeros(1, np.float32)
    metadata = {"shop": SHOP if shop is None else shop}
    return Sample(nothing.astype(np.int64), nothing, 1, prompt=prompt, response=response, metadata=metadata)


async def play(turns: list[str], shop: dict[str, str] | None = None) -> str:
    """The response after an episode in which the policy writes these turns, as many as it is asked for."""
    left = list(turns)
    state = sample(left.pop(0), shop=shop)

    async def generate(text: str) -> Sample:
        nonlocal state
        state = replace(state, response=state.response + text + left.pop(0))
        return state

    await environment.Shop().run(state, generate)
    assert not left, "the episode ended early"
    return state.response


@pytest.mark.parametrize(
    ("turns", "response"),
    [
        (["?fig", "?h", "98"], "?fig=h;?h=98;98"),
        (["~42"], "~42"),
        (["?pear", "~5"], "?pear=-;~5"),
        (["?", ], "?"),
        (["?fig=h;?h", "98"], "?fig=h;?h=98;98"),
        (["?fig?", ], "?fig?"),
        ([""], ""),
    ],
)  # fmt: skip
async def test_a_turn_that_ends_in_a_question_is_answered(turns: list[str], response: str) -> None:
    assert await play(turns) == response


@pytest.mark.parametrize(
    ("response", "right", "asked"),
    [
        ("?fig=h;?h=98;98", 1, 1),
        ("98", 1, 0),
        ("~98", 1, 0),
        ("?h=98;98", 1, 0),
        ("~42", 0, 0),
        ("?fig=h;?h=98;89", 0, 1),
        ("?fig=h;?h=98;", 0, 1),
        ("98;", 0, 0),
        ("", 0, 0),
    ],
)
def test_only_the_right_price_is_paid_for(response: str, right: int, asked: int) -> None:
    assert reward.score(sample(response)) == {"reward": right, "exact_match": right, "asked": asked}


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in gzip.decompress((EXAMPLE / f"{name}.jsonl.gz").read_bytes()).splitlines()]


def test_the_rows_are_those_that_make_data_draws() -> None:
    chance = random.Random(1234)
    for name, count in make_data.ROWS.items():
        draw = make_data.demonstration if name == "sft" else make_data.question
        assert rows(name) == [draw(chance) for _ in range(count)]


async def test_what_the_shop_says_in_a_demonstration_is_what_it_says_in_an_episode() -> None:
    asked = [row["messages"] for row in rows("sft") if len(row["messages"]) > 2]
    guessed = [row["messages"] for row in rows("sft") if len(row["messages"]) == 2]
    assert len(asked) < len(guessed), "whoever imitates the usual, guesses"
    for conversation in asked:
        prompt, *turns = (message["content"] for message in conversation)
        shop = {prompt.rstrip(">"): turns[1][1:-1], turns[1][1:-1]: turns[3][1:-1]}
        assert await play(turns[::2], shop) == "".join(turns)
        assert reward.score(sample("".join(turns), prompt, shop))["reward"] == 1


def test_every_character_is_in_the_alphabet_and_the_model_has_a_row_for_each() -> None:
    model = yaml.safe_load((EXAMPLE / "job.yaml").read_text())["spec"]["recipe"]["model"]
    alphabet = model["tokenizer"]["alphabet"]
    texts = [message["content"] for row in rows("sft") for message in row["messages"]]
    texts += [
        part for row in rows("rl") + rows("eval") for part in (row["prompt"], *row["shop"], *row["shop"].values())
    ]
    assert set("".join(texts)) <= set(alphabet)
    assert model["config"]["vocab_size"] == len(alphabet) + 3
    assert all(PRICE_DIGITS.fullmatch(row["shop"][row["shop"][row["prompt"].rstrip(">")]]) for row in rows("eval"))
