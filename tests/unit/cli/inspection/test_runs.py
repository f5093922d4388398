"""Runs listed and compared: from made facts."""

from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from polyrl.errors import UserError
from polyrl.history.foreign_text import json_line
from polyrl.history.results import Course, EvaluationPoint
from polyrl_cli.inspection.compare import (
    compare_runs,
    comparison,
    differing_settings,
    flattened,
    result_rows,
    run_labels,
)
from polyrl_cli.inspection.run_facts import LocalRunState, RunFacts
from polyrl_cli.inspection.runs import age_text, as_object, evaluation_text, runs_table, short_path, steps_text


def facts(name: str, **changes: object) -> RunFacts:
    defaults: dict[str, object] = {
        "root": Path("/home/me/runs") / name,
        "name": "sort-digits",
        "state": LocalRunState.SUCCEEDED,
        "steps": {"sft": 40, "rl": 120},
        "wanted": {"sft": 40, "rl": 120},
        "learned": {"reward": Course(first=0.5, last=0.9321, mean_of_steps=10)},
        "evaluation": EvaluationPoint(stage="rl", step=120, values={"reward": 0.9, "exact_match": 0.85}),
        "started": 1000.0,
        "seconds": 132.0,
        "settings": {"spec": {"recipe": {"seed": 0}}},
        "summary": {"tokens": {"generated": 244650}, "stepTimeRatio": 1.84123, "preemptions": 0},
        "rows": [],
    }
    return RunFacts(**{**defaults, **changes})  # type: ignore[arg-type]


def printed(table: Table, width: int) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_a_run_on_a_line() -> None:
    text = printed(
        runs_table([facts("one"), facts("two", state=LocalRunState.KILLED, evaluation=None)], 8200.0, 120), 120
    )
    one, two = (line.split("  ") for line in text.splitlines()[1:])
    shown = [cell.strip() for cell in one if cell.strip()]
    assert shown == ["/home/me/runs/one", "succeeded", "rl 120/120", "0.5 → 0.932", "exact_match 0.850", "02:12", "2 h"]
    assert [cell.strip() for cell in two if cell.strip()][1:3] == ["killed", "rl 120/120"]


def test_what_runs_cost_is_shown_where_one_of_them_has_a_price() -> None:
    cost = {"currency": "EUR\x1b[2J" + "x" * 99, "total": 12.345}
    runs = [facts("one", summary={"cost": cost}), facts("two"), facts("odd", summary={"cost": {"total": "much"}})]
    head, one, two, odd = printed(runs_table(runs, 8200.0, 200), 200).splitlines()
    assert [head.split()[index] for index in (-3, -2, -1)] == ["COST", "TOOK", "AGE"]
    assert "12.35 EUR" in one
    assert "\x1b" not in one
    assert "EUR" not in two
    assert "0.00" in odd
    assert "COST" not in printed(runs_table(runs[1:2], 8200.0, 200), 200)
    assert as_object(runs[0])["cost"]["total"] == 12.345


def test_a_resumed_run_says_whose_time_and_numbers_are_shown() -> None:
    runs = [facts("one"), facts("again", attempt=3)]
    head, one, again = printed(runs_table(runs, 8200.0, 200), 200).splitlines()
    assert head.split()[-3:] == ["ATTEMPT", "TOOK", "AGE"]
    assert (one.split()[-4], again.split()[-4]) == ("1", "3")
    assert "ATTEMPT" not in printed(runs_table(runs[:1], 8200.0, 200), 200)
    assert as_object(runs[1])["attempt"] == 3
    names = [name for name, _ in result_rows(runs)]
    assert names.index("attempt, whose numbers follow") < names.index("took")
    assert "attempt, whose numbers follow" not in [name for name, _ in result_rows(runs[:1])]


@pytest.mark.parametrize("width", [40, 50, 60, 80, 200])
def test_the_list_fits_the_terminal(width: int) -> None:
    text = printed(runs_table([facts("a" * 60)], 2000.0, width), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert width < 80 or all(whole in text for whole in ("succeeded", "rl 120/120", "exact_match 0.850", "02:12"))
    assert text.count("a") >= 60, "the path is whole, over several lines"
    assert text.split()[0] == "RUN"


@pytest.mark.parametrize(
    ("steps", "wanted", "text"),
    [
        ({}, {"sft": 40, "rl": 120}, "sft 0/40"),
        ({"sft": 3}, {"sft": 40, "rl": 120}, "sft 3/40"),
        ({"sft": 40, "rl": 1}, {"sft": 40, "rl": 120}, "rl 1/120"),
        ({}, {}, ""),
    ],
    ids=["before the first stage", "within the first", "within the second", "nothing desired"],
)
def test_steps(steps: dict[str, int], wanted: dict[str, int], text: str) -> None:
    assert steps_text(facts("one", steps=steps, wanted=wanted)) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2 h"), (172_800, "2 d")],
)
def test_age(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


def test_an_evaluation_shows_exact_match_where_it_has_one_else_its_reward() -> None:
    assert evaluation_text(facts("one").evaluation) == "exact_match 0.850"
    assert evaluation_text(EvaluationPoint(stage="rl", step=1, values={"reward": -1.5})) == "reward -1.500"
    assert evaluation_text(None) == ""


def test_a_path_is_shown_as_it_would_be_typed() -> None:
    root, here = Path("/home/me/runs/one"), Path("/home/me")
    assert short_path(root, here) == "runs/one"
    assert short_path(root, Path("/home/other")) == "/home/me/runs/one"
    assert short_path(root, Path("/home/me/run")) == "/home/me/runs/one"


def test_a_run_as_json() -> None:
    assert '"state": "succeeded"' in json_line(as_object(facts("one")))


def test_settings_that_differ() -> None:
    runs = [
        facts("one", settings={"spec": {"seed": 0, "rl": [{"path": "a"}], "same": {"deep": 1}, "gone": "x"}}),
        facts("two", settings={"spec": {"seed": 1, "rl": [{"path": "b"}], "same": {"deep": 1}}}),
    ]
    assert differing_settings(runs) == [
        ("spec.seed", ["0", "1"]),
        ("spec.rl[0].path", ["a", "b"]),
        ("spec.gone", ["x", "-"]),
    ]
    assert differing_settings([runs[0], runs[0]]) == []
    assert flattened({"a": {}, "b": [0.9, 0.95], "c": []}) == [("a", "{}"), ("b", "[0.9, 0.95]"), ("c", "[]")]


def test_results_side_by_side_without_rows_that_no_run_has() -> None:
    style = {"reward": Course(first=0.1, last=0.2, mean_of_steps=1), "style": Course(first=1, last=2, mean_of_steps=1)}
    rows = dict(result_rows([facts("one"), facts("two", learned=style, summary={}, evaluation=None)]))
    assert rows["reward"] == ["0.5 → 0.932", "0.1 → 0.2"]
    assert rows["style"] == ["-", "1 → 2"]
    assert rows["evaluated exact_match"] == ["0.85", "-"]
    assert rows["tokens generated"] == ["244,650", "-"]
    assert rows["step time ÷ the longer part"] == ["1.841", "-"]
    assert "samples trained" not in rows


def test_labels_tell_runs_apart() -> None:
    assert run_labels([facts("one"), facts("two")]) == ["one", "two"]
    assert run_labels([facts("one"), facts("one", root=Path("/other/one"))]) == ["/home/me/runs/one", "/other/one"]


@pytest.mark.parametrize("width", [40, 200])
def test_a_comparison_fits_and_obeys_nothing(width: int) -> None:
    rows = [("spec.recipe.reward.function", ["[bold]a\x1b[2J", "y" * 90])]
    text = printed(comparison("settings", ["one", "two"], rows), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert text.replace(".recipe", "").count("y") == 90
    assert "\x1b[2J" not in text


@pytest.mark.parametrize("name", ["compared", ""])
def test_a_picture_of_no_kind_is_refused_before_a_run_is_read(name: str) -> None:
    """`drawn in compared` was said, and compared.png was written; of an empty name, .png."""
    with pytest.raises(UserError, match=r"^--plot .*: name a file that ends in \.png, \.svg or \.pdf$"):
        compare_runs([Path("one"), Path("other")], Path(name), as_json=True)
