"""A deterministic "model": the token at a response position depends on the sample and the position alone.

So it does not matter who generates, and any token that is doubled, missing, foreign or past its stop shows in the ids.
"""

from __future__ import annotations

from bisect import bisect_left
from random import Random
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from polyrl.sample import split_sample_id

STOP_TOKEN: Final = 2
ENVIRONMENT_BASE: Final = 1_000_000
"""Ids from here on are written by environments, never by engines."""
PROMPT_BASE: Final = 2_000_000


def receipt_of(version: int) -> bytes:
    """What an engine shows that has pulled these weights."""
    return b"receipt of %d" % version


class Text(NamedTuple):
    """What one sample becomes, if engines write all of it."""

    tokens: npt.NDArray[np.uint32]
    """uint32[length], stop tokens among them."""
    ids: bytes
    """The same, as an engine sends it."""
    logprobs: bytes
    """float32[length]"""
    stops: list[int]
    """Positions of stop tokens, ascending."""

    def until_stop(self, begin: int, end: int) -> int:
        """The position after the first stop token in [begin, end), else `end`."""
        place = bisect_left(self.stops, begin)
        return self.stops[place] + 1 if place < len(self.stops) and self.stops[place] < end else end

    def stops_before(self, end: int) -> bool:
        """Whether the token before `end` is a stop token."""
        place = bisect_left(self.stops, end - 1)
        return place < len(self.stops) and self.stops[place] == end - 1


class Model:
    """Texts of every sample of one schedule."""

    def __init__(self, seed: int, length: int, mean_turn: int, longest_prompt: int = 6) -> None:
        self._seed = seed
        self._length = length
        self._mean_turn, self._longest_prompt = mean_turn, longest_prompt
        self._texts: dict[str, Text] = {}
        self._prompts: dict[int, bytes] = {}

    def text(self, sample: str) -> Text:
        """What engines generate at each response position of `sample`."""
        known = self._texts.get(sample)
        if known is None:
            rng = np.random.default_rng([self._seed, *split_sample_id(sample)])
            tokens = rng.integers(100, 100_000, self._length).astype("<u4")
            tokens[rng.random(self._length) < 1 / self._mean_turn] = STOP_TOKEN
            stops = np.flatnonzero(tokens == STOP_TOKEN).tolist()
            known = self._texts[sample] = Text(tokens, tokens.tobytes(), logprobs=logprobs_of(tokens), stops=stops)
        return known

    def environment(self, sample: str, begin: int, count: int) -> bytes:
        """uint32[count]: what an environment writes at [begin, begin + count)."""
        return (self.text(sample).tokens[begin : begin + count] + np.uint32(ENVIRONMENT_BASE)).astype("<u4").tobytes()

    def prompt(self, group: int) -> bytes:
        """uint32[1 to longest_prompt]"""
        known = self._prompts.get(group)
        if known is None:
            rng = Random(f"{self._seed}/{group}")
            tokens = [PROMPT_BASE + rng.randrange(1000) for _ in range(rng.randint(1, self._longest_prompt))]
            known = self._prompts[group] = np.array(tokens, dtype="<u4").tobytes()
        return known


def logprobs_of(ids: npt.NDArray[np.uint32]) -> bytes:
    """float32[T] that show which token each belongs to."""
    return (-ids.astype("<f4") / np.float32(1e6)).astype("<f4").tobytes()
