"""Learning rates by step, worked by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from polyrl.manifest.parts.optimizer import OptimizerSpec
from polyrl_trainer.backends.configs import OptimizerConfig
from polyrl_trainer.backends.optimizers.adamw import SerialAdamW, create_optimizer
from polyrl_trainer.backends.optimizers.named_state import blank_state, named_state, restore_state
from polyrl_trainer.backends.updates import Updates, learning_rate_at


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0]),
    ],
    ids=["constant", "cosine", "linear"],
)
def test_warm_up_then_decay_by_hand(schedule: str, rates: list[float]) -> None:
    config = OptimizerConfig(learning_rate=1.0, total_steps=7, schedule=schedule, warmup_steps=3)  # type: ignore[arg-type]
    assert [learning_rate_at(config, step) for step in range(9)] == pytest.approx(rates, abs=1e-6)


def test_a_schedule_may_be_ahead_of_what_was_taken() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    model = torch.nn.ParameterDict({"weight": weight})
    updates = Updates(model, OptimizerConfig(learning_rate=1.0, total_steps=8, schedule="linear", ahead=4))
    rates = []
    for _ in range(2):
        weight.sum().backward()  # type: ignore[no-untyped-call]
        updates.passes = 1
        rates.append(updates.step(1.0).learning_rate)
    assert rates == [0.5, 0.375]


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 20), st.integers(1, 40))
def test_no_step_of_the_stage_is_taken_at_rate_zero(schedule: str, warmup: int, total: int) -> None:
    config = OptimizerConfig(
        learning_rate=3e-4,
        total_steps=total,
        schedule=schedule,  # type: ignore[arg-type]
        warmup_steps=warmup,
    )
    assert all(0 < learning_rate_at(config, step) <= 3e-4 for step in range(total))


def test_the_manifest_fills_every_field() -> None:
    manifest = OptimizerSpec(learning_rate=3e-4, schedule="cosine", warmup_steps=5, weight_decay=0.1, max_grad_norm=0.5)
    config = OptimizerConfig.from_manifest(manifest, total_steps=60)
    assert config == OptimizerConfig(
        learning_rate=3e-4, total_steps=60, schedule="cosine", warmup_steps=5, weight_decay=0.1, max_grad_norm=0.5
    )


def test_a_frozen_parameter_has_no_state_and_none_is_expected() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[0].weight.requires_grad = False
    config = OptimizerConfig(learning_rate=1.0, total_steps=1)
    optimizer = create_optimizer(model, config)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = named_state(model, optimizer)
    expected = blank_state(model, optimizer, meta=True)
    assert {name: tensor.shape for name, tensor in saved.items()} == {name: one.shape for name, one in expected.items()}
    assert not any(name.endswith("0.weight") for name in saved)
    other = create_optimizer(model, config)
    restore_state(model, other, saved)
    again = named_state(model, other)
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in saved.items())


def test_moments_in_the_hosts_memory_give_the_same_bits_and_state() -> None:
    config = OptimizerConfig(learning_rate=0.1, total_steps=9, weight_decay=0.1)
    torch.manual_seed(0)
    models = [torch.nn.Linear(5, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [create_optimizer(models[0], config), create_optimizer(models[1], config, on_host=True)]
    assert isinstance(optimizers[1], SerialAdamW)
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.full((2, 5), step - 1.5)).square().sum().backward()
            optimizer.step()
        if step == 1:
            # What one wrote the other goes on from.
            for model, optimizer in zip(models, optimizers, strict=True):
                written = {name: one.clone() for name, one in named_state(model, optimizer).items()}
                restore_state(model, optimizer, written)
    states = [named_state(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    weights = [model.state_dict() for model in models]
    for one, other in (states, weights):
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
