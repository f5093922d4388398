"""Which samples are shown, in which order, and how: from made rows."""

import random

import pytest
from rich.console import Console

from polyrl.errors import UserError
from polyrl.sample import Finish, Purpose
from polyrl.sample_record import Chosen, SampleRecord
from polyrl_cli.inspection.kept_samples import Order, SampleQuery, examples, find, ordered, ranges
from polyrl_cli.inspection.samples import heading, sample_view

B, W, R = Chosen.BEST, Chosen.WORST, Chosen.RANDOM


def row(name: str, step: int, reward: float = 0.0, *chosen: Chosen, stage: str = "rl", **more: object) -> SampleRecord:
    purpose = Purpose.TRAIN if chosen else Purpose.EVAL
    defaults: dict[str, object] = {
        "time": 1.0, "metrics": {"exact_match": reward}, "advantage": 0.5 if chosen else None, "finish": Finish.STOP,
        "versions": (3,), "prompt_tokens": 8, "response_tokens": 7, "prompt": "314159>", "response": "113459",
    }  # fmt: skip
    return SampleRecord(
        purpose=purpose, stage=stage, step=step, sample=name, group=int(name.split(".")[0]), chosen=chosen,
        reward=reward, **{**defaults, **more},
    )  # fmt: skip


ROWS = [
    row("0.0", 0, 0.5, stage="sft"),
    row("1.0", 2, 0.5, stage="sft"),
    row("5.0", 1, 0.1, R),
    row("6.0", 1, 0.9, B),
    row("7.0", 2, 0.2, R),
    row("7.1", 2, 0.3, R),
    row("8.2", 2, 0.0, W),
    row("9.0", 2, 1.0, B, R),
    row("10.0", 2, 0.7),
    row("11.0", 2, 0.6),
]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        (SampleQuery(), "7.0 7.1 8.2 9.0"),
        (SampleQuery(step=1), "5.0 6.0"),
        (SampleQuery(order=Order.BEST), "9.0 7.1 7.0 8.2"),
        (SampleQuery(order=Order.WORST), "8.2 7.0 7.1 9.0"),
        (SampleQuery(order=Order.BEST, limit=1), "9.0"),
        (SampleQuery(evaluation=True), "10.0 11.0"),
        (SampleQuery(evaluation=True, step=0), "0.0"),
        (SampleQuery(evaluation=True, step=2), "10.0 11.0"),
        (SampleQuery(group=7), "7.0 7.1"),
        (SampleQuery(group=0), "0.0"),
    ],
)
def test_what_is_shown(query: SampleQuery, found: str) -> None:
    assert " ".join(one.sample for one in ordered(find(ROWS, query), query, random.Random(0))) == found


def test_drawn_ones_are_only_those_that_were_kept_whatever_their_reward() -> None:
    query = SampleQuery(order=Order.RANDOM, limit=10)
    assert {one.sample for one in ordered(find(ROWS, query), query, random.Random(0))} == {"7.0", "7.1", "9.0"}


def test_before_the_first_step_the_evaluation_is_shown() -> None:
    assert [one.sample for one in find(ROWS[:1], SampleQuery())] == ["0.0"]


@pytest.mark.parametrize(
    ("rows", "query", "sentence"),
    [
        ([], SampleQuery(), "no sample was kept yet"),
        (ROWS, SampleQuery(step=7), "nothing was kept of step 7; kept are steps 1 to 2"),
        (ROWS, SampleQuery(step=1, evaluation=True), "nothing was kept of step 1; kept are steps 0, 2"),
        (ROWS, SampleQuery(group=4), "nothing was kept of group 4; among those kept are 1, 5, 6, 7, 8, 9, 10, 11"),
        (ROWS[2:3], SampleQuery(evaluation=True), "only training samples were kept, no evaluation"),
        (ROWS[:1], SampleQuery(step=3), "only evaluations were kept (--evaluation)"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(
    rows: list[SampleRecord], query: SampleQuery, sentence: str
) -> None:
    with pytest.raises(UserError) as error:
        find(rows, query)
    assert sentence in str(error.value)


def test_ranges() -> None:
    assert ranges([4, 1, 2, 2, 9]) == "1 to 2, 4, 9"
    assert ranges(range(0, 40, 2)) == "…, 24, 26, 28, 30, 32, 34, 36, 38"


def test_examples_are_worth_a_look() -> None:
    assert examples(ROWS, 3) == ["8.2", "9.0", "7.0"]
    assert examples(ROWS[:1], 3) == ["0.0"]
    assert examples([], 3) == []


def shown(one: SampleRecord, width: int, max_chars: int | None = None) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        for part in sample_view(one, max_chars):
            console.print(part)
    return capture.get()


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_sample_fits_the_terminal_and_obeys_nothing(width: int) -> None:
    hostile = row("9.0", 2, 1.0, B, R, response="\x1b[2J[bold]x[/bold]\n\n" + "word " * 100, prompt="中" * 100)
    text = shown(hostile, width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "\\x1b[2J[bold]x[/bold]" in text
    assert "9.0  reward 1  best, random" in text
    assert text.count("word") == 100
    assert text.count("中") == 100


def test_an_empty_response_and_a_long_one() -> None:
    assert "(empty)" in shown(row("9.0", 2, response=""), 80)
    long = shown(row("9.0", 2, response="a" * 500 + "b" * 500), 80, max_chars=100)
    assert "a" * 50 in long
    assert "[… 900 more characters: --full …]" in long


def test_the_heading_names_the_moment() -> None:
    found = find(ROWS, SampleQuery(step=2))
    assert heading(found, found[:2], SampleQuery(order=Order.BEST)) == "RL step 2: 2 of 4 samples kept, best"
    assert heading(ROWS[:1], ROWS[:1], SampleQuery()) == "evaluation before training: 1 of 1 samples kept, as kept"
