"""Where the text of a response holds its first stop string: one rule for the agent beside an engine and the learner.

The end is the smallest count of tokens whose text holds one. That cannot be bisected, nor read off the whole text:
many tokenizers write rare characters a byte at a time, and some (Llama-2's, Mistral's, Gemma's) show a run of bytes
that ends within a character as U+FFFD from its first byte on. So tokens are read one after the other, each with a
bounded window of those before it, which begins where reading can begin: its text is the end of the text of more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

NO_CHARACTER: Final = "\ufffd"
"""What bytes are shown as that are no characters, or not yet."""
EDGE: Final = 8
"""Characters at a window's begin that may read otherwise there: the rest of a character's bytes, a word's space."""
CHARACTER_BYTES: Final = 4
"""A character's at most, and so the tokens that write it."""
MAX_WINDOWS: Final = 8
"""As many times what is needed is kept while bytes that are no text offer no place to begin at."""


class StopReader:
    """Reads the tokens of one response. What it answers never depends on how many come at a time."""

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stop, self._decode = stop, decode
        self._last = frozenset(one[-1] for one in stop)
        self._needed = CHARACTER_BYTES * (max(map(len, stop)) + EDGE)
        self._window: list[int] = []
        self._kinds: dict[int, tuple[bool, bool]] = {}

    def completes(self, token: int) -> bool:
        """The text holds a stop string with this token, the next one."""
        writes, may_end = self._kind(token)
        if not writes:
            return False
        self._window.append(token)
        is_long = len(self._window) >= 2 * self._needed
        if not (may_end or is_long):
            return False
        text = self._decode(self._window)
        if is_long:
            self._shorten(text)
        return any(one in text for one in self._stop)

    def _kind(self, token: int) -> tuple[bool, bool]:
        """Does it write anything, and may it write the last character of a stop string? Twice, since the first token
        of a text may lose its space."""
        if token not in self._kinds:
            text = self._decode([token, token])
            self._kinds[token] = bool(text), NO_CHARACTER in text or not self._last.isdisjoint(text)
        return self._kinds[token]

    def _shorten(self, text: str) -> None:
        """Not while the window ends within a character: nobody knows yet how its run of bytes reads."""
        length = len(self._window)
        if length >= MAX_WINDOWS * self._needed:
            del self._window[: length - self._needed]
        elif not text.endswith(NO_CHARACTER):
            begins = range(length - self._needed, length - self._needed - CHARACTER_BYTES, -1)
            readable = (begin for begin in begins if text.endswith(self._decode(self._window[begin:])))
            del self._window[: next(readable, 0)]


def end_of_stop(ids: Sequence[int], stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> int | None:
    """Position after the token that completes the first stop string; None where no text of `ids` holds one."""
    if not stop:
        return None
    reader = StopReader(stop, decode)
    return next((count for count, token in enumerate(ids, 1) if reader.completes(token)), None)
