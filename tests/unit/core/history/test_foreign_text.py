"""Texts of others do nothing to a terminal, and stay legible."""

import json

import pytest

from polyrl.history.foreign_text import json_line, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
        ("a\rb\x00\x7f", "a\\rb\\x00\\x7f"),
        ("a\u2028b\u2029", "a\\u2028b\\u2029"),
        ("\ud800", "\\ud800"),
        ("a\tb", "a    b"),
        ("a\nb\r\nc", "a\\nb\\nc"),
        ("ü 中文\u3000字 می\u200cخواهم 👩\u200d🔬", "ü 中文\u3000字 می\u200cخواهم 👩\u200d🔬"),
    ],
)
def test_what_a_terminal_would_obey_is_spelled_out(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_line_breaks_stay_where_they_are_wanted() -> None:
    assert printable("a\nb\r\n\x1bc", lines=True) == "a\nb\n\\x1bc"


def test_json_is_ascii_without_control_characters_and_loses_nothing() -> None:
    value = {"text": "\x1b\x7f\x9b\u202e中\n"}
    line = json_line(value)
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line) == value
