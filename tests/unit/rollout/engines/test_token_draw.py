"""Draws: greedy, truncation, the meaning of logprobs, and randomness that depends on stream and position alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from polyrl_rollout.engines.embedded.token_draw import Draw, draw_tokens, uniforms

ROW = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
COUNT = 20_000


def drawn(draw: Draw, count: int = COUNT) -> tuple[np.ndarray, np.ndarray]:
    return draw_tokens(np.tile(ROW, (count, 1)), [draw] * count, range(count))


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (Draw(1.0, 1.0, top_k=-1, stream=7), [0.5, 0.3, 0.15, 0.05]),
        (Draw(1.0, 1.0, top_k=2, stream=7), [0.625, 0.375, 0, 0]),
        (Draw(1.0, 0.9, top_k=-1, stream=7), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (Draw(1.0, 0.4, top_k=-1, stream=7), [1, 0, 0, 0]),
        (Draw(1.0, 0.7, top_k=3, stream=7), [0.625, 0.375, 0, 0]),
        (
            Draw(0.5, 1.0, top_k=-1, stream=7),
            np.square([0.5, 0.3, 0.15, 0.05]) / np.square([0.5, 0.3, 0.15, 0.05]).sum(),
        ),
        (Draw(0.0, 0.1, top_k=3, stream=7), [1, 0, 0, 0]),
    ],
    ids=["plain", "top-k", "top-p", "top-p below the likeliest", "top-k and top-p", "temperature", "greedy"],
)
def test_frequencies_are_those_asked_for(draw: Draw, expected: list[float]) -> None:
    tokens, _ = drawn(draw)
    # Four standard deviations of a frequency near one half.
    assert np.bincount(tokens, minlength=4) / COUNT == pytest.approx(expected, abs=4 * 0.5 / COUNT**0.5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_are_scaled_and_not_truncated(temperature: float) -> None:
    tokens, logprobs = drawn(Draw(temperature, 0.6, top_k=3, stream=1), 64)
    scaled = ROW / temperature
    assert logprobs == pytest.approx((scaled - np.log(np.exp(scaled).sum()))[tokens], abs=1e-6)


def test_greedy_logprobs_are_at_temperature_one() -> None:
    _, logprobs = drawn(Draw(0.0, 1.0, top_k=-1, stream=1), 3)
    assert logprobs == pytest.approx([np.log(0.5)] * 3, abs=1e-6)


def test_a_seeded_draw_depends_on_its_position_only_and_not_on_its_company() -> None:
    one, other = Draw(1.0, 1.0, top_k=-1, stream=3), Draw(1.3, 0.8, top_k=2, stream=4)
    alone = [draw_tokens(ROW[None], [one], [position])[0][0] for position in range(50)]
    logits = np.tile(ROW, (100, 1))
    together, _ = draw_tokens(logits, [one, other] * 50, [position for p in range(50) for position in (p, p + 9)])
    assert alone == list(together[::2])
    assert len(set(alone)) > 1


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32))
def test_uniforms_stay_in_the_unit_interval(stream: int, position: int) -> None:
    (value,) = uniforms(np.array([stream], dtype=np.uint64), np.array([position], dtype=np.uint64))
    assert 0 <= value < 1


def test_uniforms_are_splitmix64() -> None:
    # First outputs for seed 1234567, from the published reference implementation.
    expected = [6457827717110365317, 3203168211198807973]
    values = uniforms(np.array([1234567] * 2, dtype=np.uint64), np.arange(2, dtype=np.uint64))
    assert values.tolist() == [(output >> 11) * 2.0**-53 for output in expected]
