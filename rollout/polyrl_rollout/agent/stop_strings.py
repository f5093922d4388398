"""Stop strings of several tokens: an engine knows tokens only, so the agent beside it reads what it writes.

What comes is decoded a window at a time, long enough for the longest string to begin in; where the window holds one,
the whole response decides which token completed it, by the learner's own rule (`polyrl.sample.end_of_stop`). The
chunk is cut behind that token, and the request ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

from polyrl.sample import Finish, end_of_stop
from polyrl.weights import TOKENIZER_FILE
from polyrl_rollout.engines.port import EngineFailed, TokenChunk

Decode: TypeAlias = Callable[[Sequence[int]], str]
MARGIN: Final = 8
"""Characters at a window's begin that may read otherwise there: the rest of a character's bytes, a word's space."""
MAX_WINDOW: Final = 4096
"""Tokens of a window, of which special ones write nothing."""


def read_tokenizer(folder: Path) -> Decode | None:
    """That of a version's folder; None where it came without one. Raises EngineFailed."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise EngineFailed(
            "recipe.sampling.stop names strings of several tokens, and the package tokenizers, which finds them beside "
            f"the engine, cannot be imported here: {error}"
        ) from error
    try:
        decode: Decode = Tokenizer.from_file(str(path)).decode
    except Exception as error:  # the package raises nothing narrower
        raise EngineFailed(f"{path} is no tokenizer: {error}") from error
    return decode


class StopStrings:
    """Those of one sequence, while one engine generates it."""

    def __init__(self, stop: Sequence[str], decode: Decode, response: Sequence[int]) -> None:
        """`response`: what it holds already."""
        self._stop, self._decode, self._ids = stop, decode, list(response)
        self._needed = max(map(len, stop)) + MARGIN
        self._begin = 0

    def is_over(self) -> bool:
        """What there is holds one already: the engine that wrote it was lost before it said so."""
        return end_of_stop(self._ids, self._stop, self._decode) is not None

    def cut(self, chunk: TokenChunk) -> TokenChunk:
        """The chunk up to the token that completes a stop string, as the last one; the same where none does."""
        before = len(self._ids)
        self._ids += chunk.ids
        if not self._may_hold_one():
            return chunk
        end = end_of_stop(self._ids, self._stop, self._decode)
        if end is None or end <= before:
            return chunk
        kept = end - before
        return replace(chunk, ids=chunk.ids[:kept], logprobs=chunk.logprobs[:kept], finish=Finish.STOP)

    def _may_hold_one(self) -> bool:
        text = self._decode(self._ids[self._begin :])
        if any(one in text for one in self._stop):
            return True
        if len(text) > 4 * self._needed or len(self._ids) - self._begin > MAX_WINDOW:
            self._shorten()
        return False

    def _shorten(self) -> None:
        """What remains is long enough for a string to begin in."""
        middle = (self._begin + len(self._ids)) // 2
        if len(self._decode(self._ids[middle:])) >= self._needed or len(self._ids) - self._begin > MAX_WINDOW:
            self._begin = middle
