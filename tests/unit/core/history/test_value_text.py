"""Numbers of a run as a line has room for them, whatever a reward or a loss was."""

from __future__ import annotations

import pytest

from polyrl.history.rows import value_text

TEXTS = {
    0.5: "0.500",
    -1234.5678: "-1234.568",
    999_999.0: "999999.000",
    1e6: "1e+06",
    -1e12: "-1e+12",
    1e250: "1e+250",
    float("nan"): "nan",
    float("-inf"): "-inf",
}


@pytest.mark.parametrize(("value", "text"), TEXTS.items(), ids=TEXTS.values())
def test_a_number_takes_a_few_characters(value: float, text: str) -> None:
    assert value_text(value) == text
