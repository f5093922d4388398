"""examples/alliteration: what the reward pays for, and that no prompt of the evaluation was learned from."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

EXAMPLE = Path(__file__).parents[4] / "examples" / "alliteration"
SENTENCES = (EXAMPLE / "tom-sawyer.txt").read_text().splitlines()


def load(name: str) -> ModuleType:
    """Under a name of its own: other examples have a module `reward` too."""
    spec = importlib.util.spec_from_file_location(f"alliteration_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reward, prepare = load("reward"), load("prepare")


def verdict(response: str, letter: str = "t") -> dict[str, float]:
    return reward.score(SimpleNamespace(response=response, metadata={"letter": letter}))


def test_it_pays_the_share_of_the_letter_times_that_of_the_books_neighbours() -> None:
    """Five pairs of neighbours, of which the book has four; "the" is one of four words in t, once."""
    paid = {"letter": pytest.approx(4 / 6), "fluent": 0.8, "reward": pytest.approx(4 / 6 * 0.8)}
    assert verdict("took the way to the tiger.") == paid


@pytest.mark.parametrize(
    "response",
    [
        "",
        "took the",
        "took the town to them",
        "to them. Then to them.",
        "the the the.",
        "the " * 17 + ".",
        "123 456 took the way to them.",
        "日本 ; ,, took the way to them.",
    ],
    ids=["empty", "short", "unfinished", "two sentences", "three words", "long", "figures", "other signs"],
)
def test_what_is_no_end_of_one_sentence_is_worth_nothing(response: str) -> None:
    assert verdict(response)["reward"] == 0


def test_a_word_counts_once() -> None:
    assert verdict("to the to the to the.")["letter"] == pytest.approx(2 / 6)


def test_the_book_itself_is_fluent() -> None:
    for sentence in SENTENCES[:50]:
        assert verdict(sentence)["fluent"] == 1


def test_a_worked_example_begins_as_its_sentence_and_holds_the_letter_twice() -> None:
    for sentence in SENTENCES[:200]:
        for example in prepare.worked_examples(sentence):
            asked, _, first = example["prompt"].partition(": ")
            assert sentence.replace(",", "").startswith(first.replace(",", ""))
            assert sentence.endswith(example["response"])
            assert verdict(example["response"], asked[-1])["letter"] > 0


def test_the_evaluation_goes_on_with_openings_that_nothing_else_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "OUT", tmp_path)
    monkeypatch.setattr(prepare, "train_tokenizer", lambda texts: list(texts))
    prepare.main()
    openings = {}
    for name in ("sft", "rl", "eval"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        openings[name] = {row["prompt"].partition(": ")[2] for row in rows}
    assert len(openings["eval"]) == prepare.EVAL_ROWS
    assert openings["eval"].isdisjoint(openings["sft"] | openings["rl"])
