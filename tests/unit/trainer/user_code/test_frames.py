"""An error of user code is placed in the user's own code, whatever it called."""

import json
from pathlib import Path

import pytest

from polyrl.wire import MAX_REASON
from polyrl_trainer.user_code.frames import MAX_CHARS, describe, user_place


def test_the_innermost_own_frame_is_named_not_the_librarys() -> None:
    with pytest.raises(ValueError, match="property name") as raised:
        json.loads("{")
    assert user_place(raised.value).startswith(f"{Path(__file__)}:")
    assert describe(raised.value).startswith("JSONDecodeError: Expecting property name")


def test_without_a_frame_of_the_users_the_innermost_one_is_named() -> None:
    with pytest.raises(ValueError, match="property name") as raised:
        json.loads("{")
    assert raised.tb.tb_next is not None
    assert "json" in user_place(raised.value.with_traceback(raised.tb.tb_next))


def test_an_error_that_was_not_raised_has_no_place_and_a_message_has_one_line() -> None:
    assert describe(ValueError("two\nlines")) == "ValueError: two lines"
    assert describe(KeyError()) == "KeyError"
    assert describe(ValueError("\udc80")) == "ValueError: \\udc80"


def test_of_a_long_message_the_middle_is_left_out() -> None:
    """It stands in the log, in every checkpoint and in the summary: an assertion may quote two texts of megabytes."""
    text = describe(AssertionError("begin " + "x" * 5_000_000 + " end"))
    assert len(text) < MAX_CHARS + 100 < MAX_REASON - 200
    assert text.startswith("AssertionError: begin xxx")
    assert text.endswith("xxx end")
