"""What ranks tell each other comes out as it went in, and holds nothing of a sample but its tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polyrl_trainer.backends.configs import EngineConfig, ModelConfig, OptimizerConfig, SpecialTokens
from polyrl_trainer.backends.fsdp.commands import CreateCommand, LearnCommand, Work, from_bytes, to_bytes
from polyrl_trainer.backends.fsdp.rounds import plan_rounds
from polyrl_trainer.backends.packing import PackingPolicy
from polyrl_trainer.sample import Sample

SAMPLES = [
    Sample(np.array([5, 6, 7]), np.array([0, 1, 1], np.float32), prompt_length=1, id="secret", response="secret"),
    Sample(np.array([8, 2**31 - 1]), np.array([0, 1], np.float32), prompt_length=1, metadata={"key": "secret"}),
]


def test_work_survives_the_wire_with_tokens_alone() -> None:
    rounds = plan_rounds([3, 2], PackingPolicy.dense(64), 2, hidden_size=8)
    command = LearnCommand(3, Work.of(SAMPLES, rounds), 0.7, entropy_gradient=True)
    data = to_bytes(command)
    assert from_bytes(data) == command
    assert b"secret" not in data
    for found, sent in zip(command.work.samples(), SAMPLES, strict=True):
        np.testing.assert_array_equal(found.tokens, sent.tokens)
        np.testing.assert_array_equal(found.loss_mask, sent.loss_mask)


def test_a_token_of_no_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="outside of every vocabulary"):
        Work.of([Sample(np.array([1, 2**40]), np.array([0, 1], np.float32), prompt_length=1)], [])


@pytest.mark.parametrize("source", [Path("/models/one"), {"model_type": "qwen2"}], ids=["folder", "config"])
def test_a_model_survives_the_wire(source: Path | dict[str, str]) -> None:
    model = ModelConfig(source, 7, dtype="float32", special_tokens=SpecialTokens(eos=3), vocabulary=11, head="both")
    command = CreateCommand.of(1, model, EngineConfig("cpu"), optimizer=OptimizerConfig(1e-4, total_steps=3))
    back = from_bytes(to_bytes(command))
    assert isinstance(back, CreateCommand)
    assert back == command
    assert back.model() == model
