"""An environment's rewards for turns, from the host of user code to the learner."""

from __future__ import annotations

import numpy as np

from polyrl.sample import Finish, Response, Scored, Span
from polyrl.wire import pack_ids
from polyrl_trainer.data.examples import Prompt
from polyrl_trainer.data.tokenizers import CharacterTokenizer
from polyrl_trainer.generation.from_wire import scored_sample, turn_reward_metrics

TOKENIZER = CharacterTokenizer("abcdef")


def scored(metrics: dict[str, float]) -> Scored:
    """Three tokens of the policy, two of the environment, a turn without any, one of each."""
    edges = [(0, 3, 5), (3, 5, -1), (5, 6, -1), (6, 7, 6)]
    spans = tuple(Span(start, end, version=version, engine="e", attempt=1) for start, end, version in edges)
    mask = np.array([1, 1, 1, 0, 0, 0, 1], dtype=np.uint8).tobytes()
    response = Response(
        "4.0",
        pack_ids([3, 4, 5, 6, 7, 3, 4]),
        logprobs=bytes(28),
        loss_mask=mask,
        spans=spans,
        turn=2,
        finish=Finish.STOP,
    )
    return Scored(4, 0, response=response, reward=1.0, metrics=metrics)


def test_turns_begin_where_the_environments_texts_end() -> None:
    prompt = Prompt("f:1", "a", (1, 3), metadata={})
    sample = scored_sample(scored(turn_reward_metrics([0.5, 0.0, -2.0])), prompt, TOKENIZER)
    assert sample.turn_starts == (2, 7, 8)
    assert sample.turn_rewards == (0.5, 0.0, -2.0)
    assert scored_sample(scored({"exact_match": 1.0}), prompt, TOKENIZER).turn_rewards == ()


def test_turns_that_gave_nothing_take_no_room() -> None:
    assert turn_reward_metrics([0.0, 1.5, 0.0]) == {"turn_reward/1": 1.5}
