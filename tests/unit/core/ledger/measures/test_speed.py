"""What counts as an engine's speed: decoding, and not the pauses between one sample and the next."""

from __future__ import annotations

import pytest

from polyrl_rollout.testing.stage import Stage

STEP_S = 0.1
"""In which the engine makes a token."""


def generate(stage: Stage, sample: str, tokens: int) -> None:
    """One token after the other, the last one its end."""
    for left in range(tokens, 0, -1):
        stage.tokens("a", stage.number(sample), [2 if left == 1 else 5], "stop" if left == 1 else None)
        stage.now += STEP_S if left > 1 else 0.0


@pytest.mark.parametrize("pause", [2.0, 5.0], ids=["a slow first token", "a slower one"])
@pytest.mark.parametrize("apart", [0.0, 0.5], ids=["as the one before ends", "a little later"])
def test_the_time_until_a_samples_first_token_is_not_the_speed_of_decoding(apart: float, pause: float) -> None:
    """Reading, weights and the network are in it. With the next sample given at the very moment of the last token, it
    counted as a step (found by schedule 1055292)."""
    stage = Stage()
    stage.engine("a", max_running=1)
    stage.submit(1)
    if not apart:
        stage.submit(1)
    generate(stage, "0.0", 6)
    if apart:
        stage.now += apart
        stage.submit(1)
    stage.now += pause
    generate(stage, "1.0", 30)
    assert stage.ledger.state.engines["a"].step_scale == pytest.approx(STEP_S, rel=0.1)
