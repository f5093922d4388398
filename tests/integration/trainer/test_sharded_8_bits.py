"""AdamW with moments in 8 bits on several ranks: they learn what one process learns, and any number goes on from what
any other saved, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from polyrl.errors import InvalidData
from polyrl.manifest.parts.optimizer import OptimizerName
from polyrl.manifest.spec import CpuOffload
from polyrl_trainer.backend import LossInputs
from polyrl_trainer.backends.configs import AdapterConfig, CheckpointConfig, EngineConfig, ModelConfig, OptimizerConfig
from polyrl_trainer.backends.fsdp.start import LearnerGroup
from polyrl_trainer.backends.learners import Learner
from polyrl_trainer.backends.optimizers.adamw import AdamW8Bit
from polyrl_trainer.backends.single_process import TorchBackend, create_torch_backend
from polyrl_trainer.testing.backend_conformance import (
    MODEL,
    assert_weights_equal,
    draw_samples,
    exported,
    take_step,
)
from polyrl_trainer.testing.fsdp_group import group

WAIT_SECONDS = 240.0
ENGINE = EngineConfig(device="cpu", max_tokens_per_micro_batch=128, wait_seconds=WAIT_SECONDS)
PLAIN = OptimizerConfig(learning_rate=1e-3, total_steps=20, schedule="cosine", warmup_steps=3, weight_decay=0.1)
IN_8_BITS = replace(PLAIN, name=OptimizerName.ADAMW_8BIT)
assert isinstance(MODEL.source, dict)
WIDE = replace(
    MODEL,
    source={
        **MODEL.source,
        **{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "initializer_range": 0.05},
    },
)
"""Rows of one block and of two; the 23 of the embedding are cut unevenly. One layer: a second has the same matrices."""
ADAPTED = replace(WIDE, adapter=AdapterConfig(rank=16, alpha=32.0))
STEPS = 4
APART = 0.02
"""Of the way that weights went: sums in another order give other codes where a value is at the border of two."""

MakeLearner = Callable[[ModelConfig, EngineConfig, OptimizerConfig], Learner]


@pytest.fixture(scope="module", params=[2, 4, 1])
def ranks(request: pytest.FixtureRequest) -> Iterator[LearnerGroup]:
    with group(request.param) as made:
        yield made


def alone(
    model: ModelConfig = WIDE, engine: EngineConfig = ENGINE, optimizer: OptimizerConfig = IN_8_BITS
) -> TorchBackend:
    return create_torch_backend(model, engine, optimizer, CheckpointConfig(fsync=False))


def saved(backend: Learner, folder: Path) -> Path:
    folder.mkdir()
    backend.save(folder).result(WAIT_SECONDS)
    return folder


def optimizer_file(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "optimizer.safetensors")


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return float(sum((one[name] - other[name]).square().sum() for name in one)) ** 0.5


AWAY = replace(ENGINE, cpu_offload=CpuOffload.OPTIMIZER)


FOLLOWED = {
    "beside the weights": (ENGINE, IN_8_BITS),
    "float32 in the host's memory": (AWAY, PLAIN),
    "in the host's memory": (AWAY, IN_8_BITS),
}


@pytest.fixture(scope="module")
def handed_on() -> dict[str, Path]:
    """By placement of `FOLLOWED`: what the ranks before these saved."""
    return {}


@pytest.mark.parametrize("placement", FOLLOWED)
def test_ranks_are_followed_by_more_or_fewer_with_the_same_bits(
    ranks: LearnerGroup, tmp_path: Path, handed_on: dict[str, Path], placement: str
) -> None:
    """Two train, and are followed by four, and these by one."""
    engine, optimizer = FOLLOWED[placement]
    backend, before = ranks.learner(WIDE, engine, optimizer), handed_on.get(placement)
    if before is not None:
        backend.load(before)
    else:
        for number in range(3):
            take_step(backend, [draw_samples(number, 9)])
    handed_on[placement] = after = saved(backend, tmp_path / "saved")
    take_step(backend, [draw_samples(3, 9)])
    if before is not None:
        for file in ("optimizer.safetensors", "model.safetensors"):
            assert_weights_equal(load_file(after / file), load_file(before / file), f"{file} of {ranks.size}")
    backend.close()


PLACEMENTS = {
    "whole model": (WIDE, ENGINE),
    "a policy that is its own critic": (replace(WIDE, head="both"), ENGINE),
    "a critic": (replace(WIDE, head="value"), ENGINE),
    "adapters": (ADAPTED, ENGINE),
    "two copies": (WIDE, replace(ENGINE, dp_replicate=2)),
    "all in the host's memory": (WIDE, replace(ENGINE, cpu_offload=CpuOffload.ALL)),
    "moments in the host's memory": (WIDE, replace(ENGINE, cpu_offload=CpuOffload.OPTIMIZER)),
}


def step_of(backend: Learner, model: ModelConfig, number: int) -> None:
    batch = draw_samples(number, 9)
    if model.head == "tokens":
        take_step(backend, [batch])
        return

    def loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, float]]:
        assert inputs.values is not None
        return inputs.values.square().sum() - inputs.log_probs.sum(), {}

    backend.forward_backward(batch, loss).result(WAIT_SECONDS)
    backend.optim_step(9.0).result(WAIT_SECONDS)


@dataclass
class Alone:
    """One process that has learned a placement's model."""

    backend: TorchBackend
    began: dict[str, torch.Tensor]
    ended: dict[str, torch.Tensor]
    folder: Path
    """Saved then."""


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Alone]:
    """By placement, each trained once for all numbers of ranks."""

    @cache
    def made(placement: str) -> Alone:
        model, _ = PLACEMENTS[placement]
        one = alone(model)
        began = exported(one)
        for number in range(STEPS):
            step_of(one, model, number)
        return Alone(one, began, exported(one), saved(one, tmp_path_factory.mktemp("one") / "saved"))

    return made


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ranks_learn_what_one_process_learns(
    ranks: LearnerGroup, tmp_path: Path, trained_alone: Callable[[str], Alone], placement: str
) -> None:
    model, engine = PLACEMENTS[placement]
    if ranks.size == 1 and placement != "whole model":
        pytest.skip("one rank has no second copy, and as much of a model as one process")
    several, one = ranks.learner(model, engine, IN_8_BITS), trained_alone(placement)
    for number in range(STEPS):
        step_of(several, model, number)
    moved, apart = distance(one.ended, one.began), distance(exported(several), one.ended)
    assert apart < APART * moved
    places = [saved(several, tmp_path / "several"), one.folder]
    found, wanted = (optimizer_file(folder) for folder in places)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in wanted.items()
    }
    codes = [name for name, tensor in wanted.items() if tensor.dtype == torch.uint8]
    assert codes
    differ = float(np.mean([(found[name] != wanted[name]).float().mean() for name in codes]))
    assert differ < 0.05, "of 100 codes"
    # One goes on from the other's, and writes the same.
    one.backend.load(places[0])
    assert_weights_equal(optimizer_file(saved(one.backend, tmp_path / "again")), found, "state of ranks in one process")
    several.load(places[1])
    assert_weights_equal(optimizer_file(saved(several, tmp_path / "back")), wanted, "state of one process in ranks")
    several.close()


def assert_resumes_to_the_bit(made: Callable[[], Learner], folder: Path) -> None:
    straight, first, second = made(), made(), made()
    for number in range(4):
        if number == 2:
            second.load(saved(first, folder / "stopped"))
        take_step(straight, [draw_samples(number, 9)])
        take_step(first if number < 2 else second, [draw_samples(number, 9)])
    ended = [saved(one, folder / f"ended-{at}") for at, one in enumerate((straight, second))]
    for file in ("optimizer.safetensors", "model.safetensors"):
        assert_weights_equal(load_file(ended[1] / file), load_file(ended[0] / file), file)


def test_a_run_that_stopped_goes_on_to_the_bit(ranks: LearnerGroup, tmp_path: Path) -> None:
    assert_resumes_to_the_bit(lambda: ranks.learner(WIDE, ENGINE, IN_8_BITS), tmp_path)


def test_a_run_of_one_process_that_stopped_goes_on_to_the_bit(tmp_path: Path) -> None:
    assert_resumes_to_the_bit(alone, tmp_path)


@pytest.mark.parametrize("wrong", [PLAIN, IN_8_BITS], ids=lambda one: one.name.value)
def test_moments_of_the_other_kind_are_refused(ranks: LearnerGroup, tmp_path: Path, wrong: OptimizerConfig) -> None:
    other = IN_8_BITS if wrong is PLAIN else PLAIN
    first = ranks.learner(WIDE, ENGINE, wrong)
    take_step(first, [draw_samples(0, 9)])
    folder = saved(first, tmp_path / "saved")
    whose = "lacks" if wrong is PLAIN else "has"
    names = f"saved with optimizer.name {wrong.name.value}, and this run has {other.name.value}$"
    for second in (ranks.learner(WIDE, ENGINE, other), alone(optimizer=other)):
        with pytest.raises(InvalidData, match=f"this model and optimizer, it {whose} exp_avg_scale/.*; it was {names}"):
            second.load(folder)


def test_one_process_with_its_moments_elsewhere_learns_the_same_bits() -> None:
    engines = [ENGINE, replace(ENGINE, cpu_offload=CpuOffload.OPTIMIZER)]
    backends = [alone(engine=one) for one in engines]
    for number in range(3):
        for backend in backends:
            take_step(backend, [draw_samples(number, 9)])
    assert all(isinstance(backend._updates.optimizer, AdamW8Bit) for backend in backends)
    assert_weights_equal(exported(backends[1]), exported(backends[0]), "moments in the host's memory")
