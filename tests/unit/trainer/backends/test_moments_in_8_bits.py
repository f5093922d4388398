"""AdamW's moments in 8 bits: what is held so, what a code stands for, and steps beside those of float32."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
import xxhash

from polyrl.manifest.parts.optimizer import OptimizerName
from polyrl.memory.moments import in_blocks, moment_bytes
from polyrl_trainer.backends.configs import OptimizerConfig
from polyrl_trainer.backends.optimizers import adamw
from polyrl_trainer.backends.optimizers.adamw import AdamW8Bit, create_optimizer
from polyrl_trainer.backends.optimizers.blocks import dequantize, quantize, shares
from polyrl_trainer.backends.optimizers.named_state import blank_state, named_state, restore_state

CPU = torch.device("cpu")
CONFIG = OptimizerConfig(learning_rate=1e-2, total_steps=9, weight_decay=0.1, name=OptimizerName.ADAMW_8BIT)
PLAIN = OptimizerConfig(learning_rate=1e-2, total_steps=9, weight_decay=0.1)


class Weights(torch.nn.Module):
    """Parameters of these shapes, the same in each."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.each = torch.nn.ParameterList(torch.randn(shape, generator=draw) for shape in shapes)


def made(
    *shapes: tuple[int, ...], config: OptimizerConfig = CONFIG, on_host: bool = False
) -> tuple[Weights, torch.optim.AdamW]:
    model = Weights(*shapes)
    return model, create_optimizer(model, config, on_host=on_host)


def step(model: Weights, optimizer: torch.optim.AdamW, number: int) -> None:
    draw = torch.Generator().manual_seed(100 + number)
    for parameter in model.each:
        parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=draw)
    optimizer.step()


SHAPES = [
    pytest.param((16, 256), True, id="rows of one block"),
    pytest.param((3, 8, 512), True, id="several matrices"),
    pytest.param((15, 256), False, id="too small"),
    pytest.param((64, 384), False, id="rows that blocks do not fill"),
    pytest.param((8192,), False, id="a vector"),
    pytest.param((), False, id="a scalar"),
]


@pytest.mark.parametrize(("shape", "blocks"), SHAPES)
def test_moments_are_held_in_8_bits_by_the_whole_shape(shape: tuple[int, ...], blocks: bool) -> None:
    model, optimizer = made(shape)
    step(model, optimizer, 0)
    state = named_state(model, optimizer)
    held = {name.partition("/")[0]: (one.dtype, tuple(one.shape)) for name, one in state.items()}
    floats = {name: (torch.float32, shape) for name in ("exp_avg", "exp_avg_sq")}
    if blocks:
        of_blocks = (torch.float32, (*shape[:-1], shape[-1] // 256))
        codes = {name: (torch.uint8, shape) for name in floats}
        floats = {**codes, **{f"{name}_scale": of_blocks for name in codes}}
    assert held == {"step": (torch.float32, ()), **floats}
    assert in_blocks(shape) is blocks
    assert moment_bytes(OptimizerName.ADAMW_8BIT, prod(shape), prod(shape) * blocks) == sum(
        one.numel() * one.element_size() for name, one in state.items() if not name.startswith("step")
    )
    assert {name: (one.dtype, one.shape) for name, one in blank_state(model, optimizer, meta=True).items()} == {
        name: (one.dtype, one.shape) for name, one in state.items()
    }


def test_codes_stand_for_what_those_of_bitsandbytes_and_torchao_do() -> None:
    signed, unsigned = (shares(signed, CPU) for signed in (True, False))
    # Of create_dynamic_map of torchao 0.18.
    assert [xxhash.xxh3_64_hexdigest(one.numpy().tobytes()) for one in (signed, unsigned)] == [
        "8c54cbcb05904087",
        "7d7d467d7fbd8415",
    ]
    assert (float(signed[0]), float(signed[255]), float(unsigned[255])) == (float(-signed[254]), 1.0, 1.0)
    assert (float(signed[127]), float(unsigned[0])) == (0.0, 0.0)


@pytest.mark.parametrize("signed", [True, False])
def test_a_value_comes_back_as_the_nearest_share_of_its_blocks_largest(signed: bool) -> None:
    values = torch.randn((4, 512), generator=torch.Generator().manual_seed(0))
    values[1] *= 1e-9
    values[2] = 0.0
    values = values if signed else values.square()
    codes, scale = torch.empty(4, 512, dtype=torch.uint8), torch.empty(4, 2)
    quantize(values, codes, scale, signed=signed)
    assert scale[0, 1] == values[0, 256:].abs().max()
    of_block = values.view(4, 2, 256) / scale[..., None]
    distances = (of_block[..., None] - shares(signed, CPU)[0 if signed else 1 :]).abs()
    found = dequantize(codes, scale, signed=signed)
    torch.testing.assert_close(
        found.view(4, 2, 256), shares(signed, CPU)[0 if signed else 1 :][distances.argmin(-1)] * scale[..., None]
    )
    if signed:
        assert not found[2].any()


def test_steps_are_those_of_float32_but_for_a_little() -> None:
    both = [made((32, 256), (100, 3), (7,), config=one) for one in (PLAIN, CONFIG)]
    assert [isinstance(optimizer, AdamW8Bit) for _, optimizer in both] == [False, True]
    began = [one.detach().clone() for one in both[0][0].each]
    for number in range(20):
        for model, optimizer in both:
            step(model, optimizer, number)
    moved = [one.detach() - was for one, was in zip(both[0][0].each, began, strict=True)]
    apart = [one.detach() - other.detach() for one, other in zip(both[1][0].each, both[0][0].each, strict=True)]
    assert apart[0].norm() < 0.03 * moved[0].norm()
    assert apart[0].any()
    assert not apart[1].any()
    assert not apart[2].any()


def test_a_row_without_a_gradient_moves_on_as_in_float32() -> None:
    """As the embedding of a token that no batch holds any more: no second moment may be 0 beside a first one."""
    both = [made((64, 1024), config=one) for one in (PLAIN, CONFIG)]
    for model, optimizer in both:
        (weights,) = model.each
        weights.data.zero_()
        weights.grad = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1))
        for _ in range(5):
            optimizer.step()
            weights.grad = torch.zeros_like(weights)
    furthest = [float(model.each[0].detach().abs().max()) for model, _ in both]
    assert furthest[1] < 1.5 * furthest[0]


@pytest.mark.slow
@pytest.mark.parametrize("gradient", [1e-4, 1e-7, 1e-9, 1e-14])
@pytest.mark.parametrize("decay", [0.95, 0.999])
def test_small_gradients_move_weights_as_far_as_in_float32(gradient: float, decay: float) -> None:
    """Each of billions is 1e-6 and less where their norm is 0.1, and its square 1e-12: none is below all scales."""
    moved = []
    for config in (PLAIN, CONFIG):
        model, optimizer = made((16, 256), config=replace(config, betas=(0.9, decay), weight_decay=0.0))
        (weights,) = model.each
        weights.data.zero_()
        draw = torch.Generator().manual_seed(1)
        for _ in range(200):
            weights.grad = gradient * (0.3 + torch.randn(weights.shape, generator=draw))
            optimizer.step()
        moved.append(float(weights.detach().norm()))
    assert moved[1] == pytest.approx(moved[0], rel=0.01)


def test_rows_at_a_time_and_moments_elsewhere_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    several = [made((40, 512), (9, 5)), made((40, 512), (9, 5), on_host=True), made((40, 512), (9, 5))]
    for number in range(4):
        for index, (model, optimizer) in enumerate(several):
            monkeypatch.setitem(adamw.CHUNK, "cpu", 1 << 16 if index < 2 else 3 * 512)
            step(model, optimizer, number)
        if number == 1:
            # What one wrote the next goes on from.
            written = [{name: one.clone() for name, one in named_state(*one).items()} for one in several]
            for (model, optimizer), state in zip(several, [*written[1:], written[0]], strict=True):
                restore_state(model, optimizer, state)
    states = [{**model.state_dict(), **named_state(model, optimizer)} for model, optimizer in several]
    for other in states[1:]:
        assert other.keys() == states[0].keys()
        assert all(torch.equal(one, states[0][name]) for name, one in other.items())
    assert float(states[0]["step/each.0"]) == 4


def test_a_part_without_rows_steps_along() -> None:
    model, optimizer = made((40, 256))
    parameter = model.each[0]
    parameter.grad = torch.zeros_like(parameter)
    state = adamw.fresh_state(parameter, optimizer)
    part = {name: one[:0] if one.ndim else one for name, one in state.items()}
    none = parameter.detach()[:0]
    optimizer._update(none, none, part, optimizer.param_groups[0])  # type: ignore[attr-defined]
    assert float(state["step"]) == 1
