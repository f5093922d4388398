"""The calculator environment: arithmetic and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from polyrl_trainer.environments.calculator import calculate, find_call


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"), ("(1 + 2) * 3", "9"), ("-4", "-4"), ("7 / 2", "3.5"), ("7 // 2", "3"), ("7 % 4", "3"),
        ("1/0", "error"), ("2 ** 9999", "error"), ("9" * 60, "error"), ("a + 1", "error"), ("len([])", "error"),
        ("__import__('os')", "error"), ("True + 1", "error"), ("", "error"), ("1 +", "error"), ("(" * 150, "error"),
    ],
)  # fmt: skip
def test_arithmetic(expression, value):
    assert calculate(expression) == value


@given(st.text(max_size=220))
def test_any_text_gives_an_answer(text):
    assert calculate(text)


@pytest.mark.parametrize(
    ("response", "expression"),
    [
        ("let me see <calc>1+1</calc>", "1+1"),
        ("<calc>1+1</calc>\n", "1+1"),
        ("<calc>1+1", "1+1"),
        ("<calc>1+1</calc><result>2</result>so 2", None),
        ("<calc>1</calc><result>1</result><calc>2</calc>", "2"),
        ("no call", None),
        ("", None),
    ],
)
def test_only_a_call_at_the_end_is_answered(response, expression):
    assert find_call(response) == expression
