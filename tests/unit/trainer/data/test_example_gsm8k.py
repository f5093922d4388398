"""The reward of examples/gsm8k: the last number of a response, however people write it, and the form it comes in."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from polyrl_trainer.user_code.verdicts import Reward, read_reward

EXAMPLE = Path(__file__).parents[4] / "examples" / "gsm8k"


def load_reward() -> ModuleType:
    """Under a name of its own: other examples have a module `reward` too."""
    spec = importlib.util.spec_from_file_location("gsm8k_reward", EXAMPLE / "reward.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reward = load_reward()


def verdict(response: str, final: object) -> Reward:
    """What the trainer makes of the function's answer; anything but a reward fails the test."""
    read = read_reward(reward.score(SimpleNamespace(response=response, metadata={"final": final})))
    assert isinstance(read, Reward)
    return read


RIGHT = [
    (" 6 * 7 = <<6*7=42>>42\n#### 42", "42"),
    ("#### 1,234", "1234"),
    ("#### 1234", "1,234"),
    ("#### 1,234,567.50", "1234567.5"),
    ("so it is -3", "-3"),
    ("5-3", "3"),
    ("(5)-3", "3"),
    ("10 - 7 = 3", "3"),
    ("It costs $18.", "18"),
    ("#### 18.00", "18"),
    ("half of it, 0.5", "0.5"),
    ("the years 1, 2,3", "3"),
    ("1,2345", "2345"),
    ("7 of them, or 5% more", "5"),
    ("#### 18", 18),
]


@pytest.mark.parametrize(("response", "final"), RIGHT)
def test_the_last_number_is_the_answer(response: str, final: object) -> None:
    """Right is right in any form, and worth no more in the taught one."""
    read = verdict(response, final)
    assert (read.value, read.metrics["exact_match"]) == (1.0, 1.0)


def test_the_data_sets_own_column_names_the_answer() -> None:
    for answer, wanted in (("6 * 7 = <<6*7=42>>42\n#### 42", 1.0), ("so\n#### 1,042", 0.0)):
        row = SimpleNamespace(response="It is 42.", metadata={"answer": answer})
        assert reward.score(row)["exact_match"] == wanted


WRONG = ["42 is not 41", "x #### 3", "####3", "#### 3 or so", "#### 3, 4", "9" * 5000, "", "#### ", "-", ",", "..."]


@pytest.mark.parametrize("response", [*WRONG, "forty-two", "#### forty-two", "#### 3\nand more: 4"])
def test_any_other_number_or_none_is_worth_nothing(response: str) -> None:
    assert verdict(response, "42") == Reward(0.0, {"exact_match": 0.0, "final_line": 0.0})


WRONG_IN_FORM = [
    (" 6 * 7 = <<6*7=41>>41\n#### 41", "42"),
    ("#### 3", "-3"),
    ("#### -3", "3"),
    ("#### 1.234", "1234"),
    ("#### 421", "42"),
    ("#### 1,234\n", "1,235"),
]


@pytest.mark.parametrize(("response", "final"), WRONG_IN_FORM)
def test_a_wrong_final_line_is_worth_a_tenth_and_is_no_match(response: str, final: str) -> None:
    assert verdict(response, final) == Reward(0.1, {"exact_match": 0.0, "final_line": 1.0})


@given(st.integers(-(10**12), 10**12), st.text(max_size=40))
def test_a_final_line_is_read_whatever_stands_before_it(number: int, before: str) -> None:
    for written in (str(number), f"{number:,}", f"{number}.0"):
        response = f"{before}\n#### {written}"
        assert verdict(response, str(number)) == Reward(1.0, {"exact_match": 1.0, "final_line": 1.0})
        assert verdict(response, str(number + 1)).value == 0.1


@given(st.text(max_size=200))
def test_any_text_gets_a_finite_reward(response: str) -> None:
    assert verdict(response, "42").value in (0.0, 0.1, 1.0)


def test_a_user_could_read_it_at_a_glance() -> None:
    assert len(inspect.getsource(reward.score).splitlines()) < 20


@pytest.mark.parametrize("metadata", [{}, {"final": "many"}, {"final": None}, {"answer": "42 or so"}])
@pytest.mark.parametrize("response", ["42", ""])
def test_a_row_without_its_answer_raises_rather_than_scoring_zero(response: str, metadata: dict[str, object]) -> None:
    with pytest.raises((KeyError, ValueError)):
        reward.score(SimpleNamespace(response=response, metadata=metadata))
