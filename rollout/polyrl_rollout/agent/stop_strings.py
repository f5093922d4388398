"""Stop strings of several tokens: an engine knows tokens only, so the agent beside it reads what it writes.

Each token is read as it comes, by the learner's own rule (`polyrl.stop_strings`). The chunk is cut behind the one that
completes a string, and the request ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from polyrl.sample import Finish
from polyrl.stop_strings import StopReader
from polyrl.weights import TOKENIZER_FILE
from polyrl_rollout.engines.port import EngineFailed, TokenChunk

Decode: TypeAlias = Callable[[Sequence[int]], str]


def read_tokenizer(folder: Path) -> Decode | None:
    """The tokenizer of a version's folder; None where it came without one. Raises EngineFailed."""
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
    """Stop strings of one turn, while one engine generates it."""

    def __init__(self, stop: Sequence[str], decode: Decode, turn: Sequence[int]) -> None:
        """`turn`: what it holds already."""
        self._reader = StopReader(stop, decode)
        self._is_over = any([self._reader.completes(token) for token in turn])

    def is_over(self) -> bool:
        """What there is holds one already: the engine that wrote it was lost before it said so."""
        return self._is_over

    def cut(self, chunk: TokenChunk) -> TokenChunk:
        """The chunk up to the token that completes a stop string, as the last one; the same where none does."""
        kept = next((count for count, token in enumerate(chunk.ids, 1) if self._reader.completes(token)), None)
        if kept is None:
            return chunk
        return replace(chunk, ids=chunk.ids[:kept], logprobs=chunk.logprobs[:kept], finish=Finish.STOP)
