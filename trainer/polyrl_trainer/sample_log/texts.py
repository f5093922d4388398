"""Texts for samples.jsonl: valid UTF-8, and no longer than the manifest allows."""

from __future__ import annotations

from typing import Final

MAX_NAME_CHARS: Final = 200
"""Characters of the name of a reward's metric, which is the user's."""


def readable(text: str, max_chars: int) -> str:
    """`text` with the middle left out where it is too long, for answers stand at the end; half a surrogate pair, which
    JSON can carry and UTF-8 cannot, is spelled out."""
    left_out = len(text) - max_chars
    if left_out > 0:
        head = (max_chars + 1) // 2
        text = f"{text[:head]} […{left_out:,} characters left out…] {text[head + left_out :]}"
    return text.encode(errors="backslashreplace").decode()
