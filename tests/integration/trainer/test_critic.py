"""The critic of PPO on a real model: what it says, how it learns, and that a checkpoint has it."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from polyrl.errors import InvalidData
from polyrl.manifest.parts.algorithm import AlgorithmSpec
from polyrl.manifest.recipe import RecipeSpec
from polyrl_trainer.backends.configs import EngineConfig
from polyrl_trainer.backends.single_process import TorchBackend
from polyrl_trainer.checkpoints import CRITIC, Checkpoints
from polyrl_trainer.data.tokenizers import CharacterTokenizer
from polyrl_trainer.loops.critic import SharedCritic
from polyrl_trainer.loops.stages import Stages
from polyrl_trainer.losses import averages, policy_loss, whitened, with_advantages
from polyrl_trainer.losses.critic import value_loss
from polyrl_trainer.losses.policy_gradient import policy_gradient
from polyrl_trainer.sample import Sample
from polyrl_trainer.session import Session
from polyrl_trainer.state import TrainerState, TrainingStage
from polyrl_trainer.testing.backend_conformance import MODEL, assert_weights_equal, draw_samples, exported

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
        spec,
        folder,
        prepared=prepared,
        session=session,
        engine=EngineConfig("cpu"),
        max_context=64,
        resumed_from=resumed_from,
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
            first = critic.take_metrics({})
            await taught(critic, spec.algorithm, 30)
            last = critic.take_metrics({})
            assert last["critic/vf_loss"] < first["critic/vf_loss"] / 2
            assert first["critic/lr"] == 0.01
            assert (critic.warms_up(1), critic.warms_up(2)) == (True, False)
            # Sums begin anew with each step.
            await taught(critic, spec.algorithm, 1)
            assert critic.take_metrics({})["critic/vf_loss"] < last["critic/vf_loss"] / 2

    asyncio.run(run())


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["whole", "adapters"])
def test_a_checkpoint_has_it_and_a_resume_goes_on_to_the_bit(tmp_path: Path, lora: dict[str, int] | None) -> None:
    spec = recipe(lora=lora)

    async def run() -> None:
        first = stages(tmp_path / "first", spec)
        with first._critic(MODEL.source) as critic:
            assert critic is not None
            await taught(critic, spec.algorithm, 3)
            saved = first.session.checkpoints.save(first.session.state, critic.backend, first.session.critic).result(
                WAIT_SECONDS
            )
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


SHARED: Any = {"trunk": "shared", "coefficient": 1.0, "valueClip": 10.0}


def one_trunk(folder: Path, lora: dict[str, int] | None = None) -> tuple[TorchBackend, AlgorithmSpec]:
    spec = recipe(lora=lora)
    critic = spec.algorithm.critic.model_validate(SHARED)
    optimizer = spec.algorithm.optimizer.model_copy(update={"learning_rate": 0.01})
    algorithm = spec.algorithm.model_copy(update={"critic": critic, "optimizer": optimizer})
    backend = stages(folder, spec.model_copy(update={"algorithm": algorithm}))._rl_backend(MODEL.source)
    return backend, algorithm


def prepared(backend: TorchBackend, algorithm: AlgorithmSpec) -> list[Sample]:
    values = backend.values(SAMPLES).result(WAIT_SECONDS)
    drawn = backend.log_probs(SAMPLES).result(WAIT_SECONDS)
    samples = [
        replace(one, old_values=value, rollout_log_probs=score, old_log_probs=score)
        for one, value, score in zip(SAMPLES, values, drawn, strict=True)
    ]
    return whitened(with_advantages(samples, algorithm), algorithm)


def update(backend: TorchBackend, algorithm: AlgorithmSpec) -> dict[str, float]:
    learning = backend.forward_backward(prepared(backend, algorithm), policy_loss(algorithm))
    sums = learning.result(WAIT_SECONDS)
    backend.optim_step(sums["tokens"]).result(WAIT_SECONDS)
    return averages(sums)


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["whole", "adapters"])
def test_on_one_trunk_policy_and_critic_learn_and_engines_see_the_policy_alone(
    tmp_path: Path, lora: dict[str, int] | None
) -> None:
    backend, algorithm = one_trunk(tmp_path, lora)
    plain = stages(
        tmp_path, RecipeSpec.model_validate({"model": {"config": MODEL.source, "dtype": "float32"}})
    )._rl_backend(MODEL.source)
    assert_weights_equal(exported(backend), exported(plain), "what engines are sent")
    for one, other in zip(*(both.log_probs(SAMPLES).result(WAIT_SECONDS) for both in (backend, plain)), strict=True):
        np.testing.assert_array_equal(one, other)
    updates = [update(backend, algorithm) for _ in range(30)]
    assert updates[-1]["vf_loss"] < updates[0]["vf_loss"] / 2
    for one in SharedCritic(backend, recipe()).take_metrics(updates[0]):
        assert one in ("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean")
    assert any(not torch.equal(one, exported(plain)[name]) for name, one in exported(backend).items())


def test_its_loss_is_the_sum_of_both(tmp_path: Path) -> None:
    backend, algorithm = one_trunk(tmp_path)
    samples = prepared(backend, algorithm)
    both = backend.forward_backward(samples, policy_loss(algorithm)).result(WAIT_SECONDS)
    alone = backend.forward_backward(samples, partial(policy_gradient, algorithm=algorithm)).result(WAIT_SECONDS)
    critic = backend.forward_backward(samples, partial(value_loss, algorithm=algorithm)).result(WAIT_SECONDS)
    weight = algorithm.model_copy(update={"critic": algorithm.critic.model_copy(update={"coefficient": 0.25})})
    quarter = backend.forward_backward(samples, policy_loss(weight)).result(WAIT_SECONDS)
    assert both["loss"] == pytest.approx(alone["loss"] + critic["loss"], rel=1e-5)
    assert quarter["loss"] == pytest.approx(alone["loss"] + critic["loss"] / 4, rel=1e-5)


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["whole", "adapters"])
def test_on_one_trunk_a_resume_goes_on_to_the_bit(tmp_path: Path, lora: dict[str, int] | None) -> None:
    first, algorithm = one_trunk(tmp_path / "first", lora)
    update(first, algorithm)
    folder = tmp_path / "model"
    folder.mkdir()
    first.save(folder).result(WAIT_SECONDS)
    names = load_file(folder / "model.safetensors").keys()
    assert "score.weight" not in names, "a language model as any other"
    if lora:
        adapters = load_file(folder / "adapter" / "adapter_model.safetensors").keys()
        assert all(".lora_" in name for name in adapters), "as peft and engines read them"
    second, _ = one_trunk(tmp_path / "second", lora)
    second.load(folder)
    for backend in (first, second):
        update(backend, algorithm)
    assert_weights_equal(exported(second), exported(first), "after a resume")
    for one, other in zip(*(both.values(SAMPLES).result(WAIT_SECONDS) for both in (first, second)), strict=True):
        np.testing.assert_array_equal(one, other)
