"""What a run prints last: from made summaries, on terminals of any width."""

from pathlib import Path

import pytest
from rich.console import Console

from polyrl.history.cost import run_cost
from polyrl.history.losses import RolloutLoss
from polyrl.history.results import Course, EvaluationPoint
from polyrl.manifest.scaling import PricingSpec
from polyrl.sample import Pool
from polyrl.status import SampleCounts, TokenCounts
from polyrl_cli.report.panel import print_summary
from polyrl_cli.report.summary import Summary


def point(stage: str, step: int, **values: float) -> EvaluationPoint:
    return EvaluationPoint(stage=stage, step=step, values=values)


EXACT = [
    point("", 0, exact_match=0.0, reward=0.0),
    point("sft", 40, exact_match=0.5, reward=0.5),
    point("rl", 50, exact_match=0.7, reward=0.7),
    point("rl", 100, exact_match=0.9, reward=0.9),
]


def a_summary(**facts: object) -> Summary:
    defaults: dict[str, object] = {
        "job": "sort-digits",
        "outcome": "succeeded",
        "why": "the trainer is done",
        "seed": 7,
        "run_epoch": 1,
        "exact_match": {"base": 0.0, "afterSft": 0.5, "afterRl": 0.9},
        "cause": "",
        "learned": {"reward": Course(first=0.4871, last=0.9312, mean_of_steps=10)},
        "evaluations": EXACT,
        "samples_trained": 60,
        "samples_evaluated": 30,
        "steps": {"sft": 40, "rl": 100},
        "wall_seconds": 125.0,
        "seconds": {"start": 9.0, "sft": 6.0, "rl": 100.0, "rest": 10.0},
        "samples": SampleCounts(submitted=100, acknowledged=90, discarded={"rewardRaised": 10}),
        "tokens": TokenCounts(generated=700, kept=690, regenerated=10),
        "bytes_per_token": 13.5,
        "preemptions": 0,
        "losses": [],
        "generate_seconds": 70.0,
        "train_seconds": 60.0,
        "step_time_ratio": 1.3,
        "user_code_failures": {"rewardRaised": 10},
        "first_failures": {"rewardRaised": "ZeroDivisionError: division by zero (reward.py:3)"},
        "step_parts": {"generate": 70.0, "train": 60.0},
    }
    return Summary(**{**defaults, **facts})  # type: ignore[arg-type]


def printed(summary: Summary, folder: Path, width: int = 100, rewards: tuple[float, ...] = ()) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        print_summary(summary, folder, console, rewards)
    return capture.get()


def words(text: str) -> str:
    """All of the panel as one line: what was wrapped is joined."""
    return " ".join(text.replace("│", " ").split())


LOSS = RolloutLoss(
    worker="rollout-0", at_seconds=52.0, text="declared fault: rollout-0 killed without notice at step 30",
    replaced_after_seconds=7.1, step_seconds=0.9, median_step_seconds=0.8,
)  # fmt: skip


@pytest.mark.parametrize("width", [40, 41, 60, 79, 80, 81, 120, 200])
def test_it_fits_the_terminal_and_loses_no_word(tmp_path: Path, width: int) -> None:
    text = printed(a_summary(losses=[LOSS], preemptions=1), tmp_path, width)
    assert all(len(line) <= min(width, 80) for line in text.splitlines()[:-1])
    for part in (
        "reward 0.487 → 0.931",
        "exact match before",
        "exact match after SFT",
        "0.900",
        "1.30 × the longer of generating and training",
        "100 submitted = 60 trained + 30 evaluated + 10 discarded (10 rewardRaised)",
        "ZeroDivisionError: division by zero",
        "rollout-0 killed without notice at step 30",
        "replaced after 7.1 s",
    ):
        assert part in words(text), (part, text)
    assert "…" not in text
    assert any("after RL" in line and "0.900" in line for line in text.splitlines()), "a bar beside its label"


def test_reward_comes_first_with_its_course(tmp_path: Path) -> None:
    text = printed(a_summary(), tmp_path, rewards=tuple(range(160)))
    assert text.index("reward ") < text.index("exact match")
    assert "0.487 → 0.931  ▁▁▂▂▃▃▄▄▅▅▆▆▇▇██" in text


def test_a_number_that_repeats_the_reward_is_left_out(tmp_path: Path) -> None:
    same = Course(first=0.2, last=0.7, mean_of_steps=10)
    other = Course(first=0.2, last=0.8, mean_of_steps=10)
    text = printed(a_summary(learned={"reward": same, "exact_match": same, "style": other}), tmp_path)
    assert "exact_match" not in text
    assert "style   0.2 → 0.8" in text


def test_exact_match_is_named_only_where_the_reward_gives_it(tmp_path: Path) -> None:
    points = [point("", 0, reward=-2.5, style=0.1), point("rl", 100, style=0.75, reward=3.25)]
    courses = {"reward": (-2.0, 3.0), "style": (1.0, 2.0)}
    learned = {name: Course(first=low, last=high, mean_of_steps=1) for name, (low, high) in courses.items()}
    text = printed(a_summary(evaluations=points, learned=learned, exact_match={}), tmp_path)
    assert "exact match" not in text
    assert "evaluated before    reward -2.5, style 0.1" in text
    assert "evaluated after RL  reward 3.25, style 0.75" in text
    assert "style   1 → 2" in text


def test_an_interrupted_run_shows_its_last_evaluation(tmp_path: Path) -> None:
    text = printed(a_summary(outcome="interrupted", why="the run was asked to stop", evaluations=EXACT[:3]), tmp_path)
    assert "exact match at RL step 50" in text
    assert "0.700" in text
    assert "exact match after SFT" in text


def test_samples_of_steps_that_were_undone_are_neither_trained_nor_lost(tmp_path: Path) -> None:
    text = printed(a_summary(samples_trained=50), tmp_path)
    assert "50 trained + 30 evaluated + 10 of steps that did not become whole + 10 discarded" in words(text)


def test_a_failure_begins_with_its_cause_and_ends_with_the_exit_code(tmp_path: Path) -> None:
    cause = "step 3: more than 8 prompts had to be replaced: rewardRaised 9 (first: \x1b[2JKeyError: [/bold] 'answer')"
    nothing = {"exact_match": {}, "evaluations": [], "learned": {}}
    summary = a_summary(outcome="failed", cause=cause, why="the trainer ended with exit code 1", **nothing)
    text = words(printed(summary, tmp_path))
    assert "\x1b" not in text
    assert "(first: \\x1b[2JKeyError: [/bold] 'answer') the trainer ended with exit code 1 steps 40 SFT" in text
    assert "exact match" not in text


def test_a_failure_without_words_still_says_what_was_seen(tmp_path: Path) -> None:
    text = printed(a_summary(outcome="failed", why="the manager ended with exit code -9"), tmp_path)
    assert "the manager ended with exit code -9" in text


def test_a_long_cause_is_cut_and_said_to_be(tmp_path: Path) -> None:
    cause = "\n".join(f"job.yaml:{line} something is wrong" for line in range(40))
    text = printed(a_summary(outcome="failed", cause=cause), tmp_path)
    assert "job.yaml:11" in text
    assert "job.yaml:12" not in text
    assert "28 lines more" in text


def test_only_files_that_hold_something_are_named(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "prints.log").touch()
    assert "prints.log" not in printed(a_summary(), tmp_path)
    (tmp_path / "logs" / "prints.log").write_text("hello\n")
    assert "logs/prints.log" in printed(a_summary(), tmp_path)


def test_what_it_cost_is_shown_where_there_are_prices(tmp_path: Path) -> None:
    cost = run_cost(PricingSpec(spotPerHour=36.0, currency="EUR"), {Pool.SPOT: 250.0, Pool.RESERVED: 125.0})
    assert "2.50 EUR (spot 2.50; reserved has no price)" in printed(a_summary(cost=cost), tmp_path)
    assert "EUR" not in printed(a_summary(), tmp_path)


def test_an_exact_match_of_several_answers_is_shown_with_its_pass_rate(tmp_path: Path) -> None:
    values = {"exact_match": 0.25, "reward": 0.5, "pass@1": 0.25, "pass@2": 0.4, "pass@8": 0.625}
    text = words(printed(a_summary(evaluations=[EvaluationPoint(stage="", step=0, values=values)]), tmp_path))
    assert "0.250 pass@8 0.625" in text
    assert "pass@" not in words(printed(a_summary(), tmp_path))


def test_a_resumed_run_says_whose_numbers_it_shows(tmp_path: Path) -> None:
    assert "attempt" not in printed(a_summary(), tmp_path)
    text = " ".join(printed(a_summary(run_epoch=3), tmp_path).replace("│", " ").split())
    assert "attempt number 3, whose time, samples and losses follow; summary-of-epoch-2.json has those before" in text
