"""What counts as an engine's speed: decoding, and not the pauses between one sample and the next."""

from __future__ import annotations

import pytest

from polyrl.wire import pack_ids
from polyrl_rollout.testing.flow import Flow, Speed
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
    stage.pass_time_heard(pause)
    generate(stage, "1.0", 30)
    assert stage.ledger.state.engines["a"].step_scale == pytest.approx(STEP_S, rel=0.1)


@pytest.mark.parametrize("away_s", [5.0, 60.0])
def test_the_time_in_which_the_manager_was_away_is_no_engines(away_s: float) -> None:
    """Its frames of that time lie in the sockets, and the first are read before the tick that is late: an engine that
    idled afterwards stood as a hundred times slower (found by schedule 1413528)."""
    stage = Stage()
    stage.engine("a", max_running=1)
    stage.submit(1)
    for _ in range(20):
        stage.tokens("a", 1, [5])
        stage.now += STEP_S
    stage.now += away_s
    for _ in range(30):
        stage.tokens("a", 1, [5])
        stage.pass_time(0.001)
    for _ in range(25):
        stage.tokens("a", 1, [5])
        stage.pass_time(STEP_S)
    assert stage.ledger.state.engines["a"].step_scale == pytest.approx(STEP_S, rel=0.1)


@pytest.mark.parametrize("prompt", [200, 1000], ids=["short prompts", "long prompts"])
def test_samples_whose_prompts_are_not_read_yet_make_no_engine_slower(prompt: int) -> None:
    """An engine reads one prompt after the other while it decodes what it has read. All that it ran counted as
    decoding: it stood as eight times slower, and idled beside the others of its fleet."""
    flow = Flow({"a": Speed(0.02, half_batch=64.0, prefill_s=1.0 / prompt)}, lambda sample, turn: 1000)
    flow.submit(12, prompt_ids=pack_ids([9] * prompt), max_new_tokens=2000)
    flow.run(until=16.0)
    assert flow.ledger.state.engines["a"].step_scale == pytest.approx(0.02, rel=0.15)
