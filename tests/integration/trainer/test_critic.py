"""The critic of PPO on a real model: what it says, how it learns, and that a checkpoint has it."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polyrl.errors import InvalidData
from polyrl.manifest.recipe import RecipeSpec
from polyrl_trainer.backends.configs import EngineConfig
from polyrl_trainer.checkpoints import CRITIC, Checkpoints
from polyrl_trainer.data.tokenizers import CharacterTokenizer
from polyrl_trainer.loops.stages import Stages
from polyrl_trainer.losses import whitened, with_advantages
from polyrl_trainer.sample import Sample
from polyrl_trainer.session import Session
from polyrl_trainer.state import TrainerState, TrainingStage
from polyrl_trainer.testing.backend_conformance import MODEL, draw_samples

WAIT_SECONDS = 60.0
SAMPLES = [replace(one, reward=float(index % 2)) for index, one in enumerate(draw_samples(3, 8))]


def recipe(**model: Any) -> RecipeSpec:
    critic = {"warmupSteps": 1, "valueClip": 10.0, "optimizer": {"learningRate": 0.01}}
    algorithm = {"name": "ppo", "oldLogProbs": "recompute", "steps": 40, "promptsPerStep": 8, "critic": critic}
    return RecipeSpec.model_validate(
        {"model": {"config": MODEL.source, "dtype": "float32", **model}, "algorithm": algorithm}
    )


def stages(folder: Path, spec: RecipeSpec, resumed_from: Path | None = None) -> Stages:
    checkpoints = Checkpoints(folder, keep=2)
    checkpoints.start()
    state = TrainerState(seed=0, stage=TrainingStage.RL, step=1 if resumed_from else 0)
    nowhere: Any = None
    session = Session(state, checkpoints, nowhere, checkpoint_every_steps=1)
    prepared: Any = SimpleNamespace(tokenizer=CharacterTokenizer("0123456789abcdefghij"))
    return Stages(
        spec, folder, prepared=prepared, session=session, engine=EngineConfig("cpu"), resumed_from=resumed_from
    )


async def taught(critic: Any, algorithm: Any, updates: int) -> list[Sample]:
    """Samples with the values of before each update."""
    samples = SAMPLES
    for _ in range(updates):
        samples = await critic.with_values(SAMPLES)
        await critic.learn(whitened(with_advantages(samples, algorithm), algorithm))
    return samples


def test_it_learns_what_is_rewarded_and_says_so(tmp_path: Path) -> None:
    spec = recipe()

    async def run() -> None:
        with stages(tmp_path, spec)._critic(MODEL.source) as critic:
            assert critic is not None
            before = await taught(critic, spec.algorithm, 1)
            assert [one.old_values.shape for one in before] == [(one.length,) for one in SAMPLES]
            first = critic.take_metrics()
            await taught(critic, spec.algorithm, 30)
            last = critic.take_metrics()
            assert last["critic/vf_loss"] < first["critic/vf_loss"] / 2
            assert first["critic/lr"] == 0.01
            assert (critic.warms_up(1), critic.warms_up(2)) == (True, False)
            # Sums begin anew with each step.
            await taught(critic, spec.algorithm, 1)
            assert critic.take_metrics()["critic/vf_loss"] < last["critic/vf_loss"]

    asyncio.run(run())


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["whole", "adapters"])
def test_a_checkpoint_has_it_and_a_resume_goes_on_to_the_bit(tmp_path: Path, lora: dict[str, int] | None) -> None:
    spec = recipe(lora=lora)

    async def run() -> None:
        first = stages(tmp_path / "first", spec)
        with first._critic(MODEL.source) as critic:
            assert critic is not None
            await taught(critic, spec.algorithm, 3)
            saved = first.session.checkpoints.save(first.session.state, critic.backend, first.session.critic)
            await taught(critic, spec.algorithm, 1)
            wanted = await critic.with_values(SAMPLES)
        assert first.session.critic is None
        with stages(tmp_path / "second", spec, saved)._critic(MODEL.source) as resumed:
            assert resumed is not None
            await taught(resumed, spec.algorithm, 1)
            found = await resumed.with_values(SAMPLES)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one.old_values, other.old_values)
        shutil.rmtree(saved / CRITIC)
        with (
            pytest.raises(InvalidData, match="was saved without a critic, and advantage gae needs one"),
            stages(tmp_path / "third", spec, saved)._critic(MODEL.source),
        ):
            pass

    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
    asyncio.run(run())


def test_other_algorithms_have_none(tmp_path: Path) -> None:
    spec = RecipeSpec.model_validate({"model": {"config": MODEL.source}})
    with stages(tmp_path, spec)._critic(MODEL.source) as critic:
        assert critic is None
