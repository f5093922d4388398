"""Texts that others wrote (models, data, user code, logs), made harmless for a terminal.

A response may hold escape sequences that clear the screen, change its title or type in the user's place, and marks that
turn the reading direction around. What a terminal would obey is spelled out instead: `\\x1b`, `\\u202e`.
"""

from __future__ import annotations

import json
import unicodedata
from typing import Final

import msgspec

TAB: Final = "    "
JOINERS: Final = "\u200c\u200d"
"""Format characters without which some scripts, and many emoji, cannot be written."""
OBEYED: Final = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's categories of what is no glyph: control, format, half a surrogate pair, line and paragraph separators."""


def printable(text: str, *, lines: bool = False) -> str:
    """`text` as it may be printed; line breaks stay only where `lines` says so."""
    if text.isprintable():
        return text
    text = text.replace("\r\n", "\n").replace("\t", TAB)
    return "".join(_shown(character, lines) for character in text)


def _shown(character: str, lines: bool) -> str:
    if character in JOINERS or (lines and character == "\n"):
        return character
    if unicodedata.category(character) not in OBEYED:
        return character
    return character.encode("unicode_escape", "surrogatepass").decode()


def json_line(value: object) -> str:
    """A value of ours as one line of JSON that any terminal may show: all but printable ASCII is escaped."""
    return json.dumps(msgspec.to_builtins(value))
