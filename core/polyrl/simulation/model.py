"""A deterministic "model": the token at a response position depends on the sample and the position alone.

So it does not matter who generates, and any token that is doubled, missing, foreign or past its stop shows in the ids.

Refuses to hold: time. Read next: `engine`.
"""

from __future__ import annotations

from random import Random
from typing import Final

import numpy as np
import numpy.typing as npt

from polyrl.sample import split_sample_id

STOP_TOKEN: Final = 2
ENVIRONMENT_BASE: Final = 1_000_000
"""Ids from here on are written by environments, never by engines."""
PROMPT_BASE: Final = 2_000_000


class Model:
    """Tokens of every sample of one schedule."""

    def __init__(self, seed: int, length: int, mean_turn: int) -> None:
        self._seed = seed
        self._length = length
        self._mean_turn = mean_turn
        self._tokens: dict[str, npt.NDArray[np.uint32]] = {}

    def tokens(self, sample: str) -> npt.NDArray[np.uint32]:
        """uint32[length]: what an engine generates at each response position; stop tokens among them."""
        known = self._tokens.get(sample)
        if known is None:
            rng = np.random.default_rng([self._seed, *split_sample_id(sample)])
            known = rng.integers(100, 100_000, self._length).astype("<u4")
            known[rng.random(self._length) < 1 / self._mean_turn] = STOP_TOKEN
            self._tokens[sample] = known
        return known

    def until_stop(self, sample: str, begin: int, end: int) -> int:
        """The position after the first stop token in [begin, end), else `end`."""
        stops = np.flatnonzero(self.tokens(sample)[begin:end] == STOP_TOKEN)
        return begin + int(stops[0]) + 1 if stops.size else end

    def environment(self, sample: str, begin: int, count: int) -> bytes:
        """uint32[count]: what an environment writes at [begin, begin + count)."""
        return (self.tokens(sample)[begin : begin + count] + np.uint32(ENVIRONMENT_BASE)).astype("<u4").tobytes()

    def prompt(self, group: int) -> bytes:
        """uint32[1..6]"""
        rng = Random(f"{self._seed}/{group}")
        count = rng.randint(1, 6)
        return np.array([PROMPT_BASE + rng.randrange(1000) for _ in range(count)], dtype="<u4").tobytes()


def logprobs_of(ids: npt.NDArray[np.uint32]) -> bytes:
    """float32[T] that tell which token each belongs to."""
    return (-ids.astype("<f4") / np.float32(1e6)).astype("<f4").tobytes()
