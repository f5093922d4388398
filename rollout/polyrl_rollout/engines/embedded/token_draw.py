"""Draws a batch's next tokens, each request by its own sampling parameters, and reports their logprobs.

Randomness is counter-based: a request at position p uses output p of the SplitMix64 sequence that starts at its stream,
so a request draws the same tokens wherever and in however many attempts it is generated.
Algorithms: SplitMix64 (Steele, Lea, Flood 2014); inverse transform sampling; nucleus sampling (Holtzman et al. 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_UNIT: Final = 2.0**-53
"""A float64 holds 53 random bits."""


@dataclass(frozen=True)
class Draw:
    """How one request draws."""

    temperature: float
    """0 is greedy."""
    top_p: float
    top_k: int
    """-1 keeps the whole vocabulary."""
    stream: int
    """Names the request's random sequence; 64 bits."""

    @property
    def truncates(self) -> bool:
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0)


def uniforms(streams: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """float64[n] in [0, 1), a pure function of uint64[n] streams and uint64[n] positions."""
    with np.errstate(over="ignore"):
        z = streams + (positions + np.uint64(1)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
        z = z ^ (z >> np.uint64(31))
    return np.asarray((z >> np.uint64(11)).astype(np.float64) * _UNIT)


def draw_tokens(
    logits: npt.NDArray[np.float32], draws: Sequence[Draw], positions: Sequence[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """int64[n] tokens and float32[n] logprobs from float32[n, V] logits.

    Logprobs are of log_softmax(logits / temperature) before top-k and top-p; greedy requests use temperature 1.
    """
    temperatures = np.array([draw.temperature if draw.temperature > 0 else 1.0 for draw in draws], dtype=np.float32)
    logprobs = _log_softmax(logits / temperatures[:, None])
    streams = np.array([draw.stream for draw in draws], dtype=np.uint64)
    points = uniforms(streams, np.array(positions, dtype=np.uint64))
    tokens = _inverse_transform(np.exp(logprobs), points)
    for row, draw in enumerate(draws):
        if draw.temperature == 0:
            tokens[row] = logits[row].argmax()
        elif draw.truncates:
            tokens[row] = _draw_truncated(np.exp(logprobs[row]), points[row], draw)
    return tokens, logprobs[np.arange(len(draws)), tokens]


def _log_softmax(scores: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    shifted = scores - scores.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)), dtype=np.float32)


def _inverse_transform(probs: npt.NDArray[np.float32], points: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The first index whose cumulative mass exceeds its row's point; never one without mass."""
    cumulative = probs.cumsum(axis=-1, dtype=np.float64)
    targets = points * cumulative[:, -1]
    return np.asarray((cumulative <= targets[:, None]).sum(axis=-1), dtype=np.int64)


def _draw_truncated(probs: npt.NDArray[np.float32], point: np.float64, draw: Draw) -> int:
    """Draws from the k likeliest tokens, of these from the fewest that hold `top_p` of the whole mass."""
    order = np.argsort(-probs, kind="stable")
    if draw.top_k > 0:
        order = order[: draw.top_k]
    cumulative = probs[order].cumsum(dtype=np.float64)
    kept = int(np.searchsorted(cumulative, draw.top_p, side="left")) + 1
    cumulative = cumulative[:kept]
    return int(order[np.searchsorted(cumulative, point * cumulative[-1], side="right")])
