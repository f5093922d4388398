"""AdamW, the same with its moments in the host's memory, and with them in 8 bits, there or beside the weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, Final

import torch
from torch import nn
from torch.optim.adamw import adamw

from polyrl.manifest.parts.optimizer import OptimizerName
from polyrl.memory.moments import BLOCK, in_blocks
from polyrl_trainer.backends.configs import OptimizerConfig
from polyrl_trainer.backends.fsdp.shard_files import local_part
from polyrl_trainer.backends.optimizers.blocks import SCALE, dequantize, quantize

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
SIGNED: Final = MOMENTS[:1]
STEP: Final = "step"
OF_KERNEL: Final = ("lr", "weight_decay", "eps", "amsgrad", "maximize", "fused")
State = dict[str, torch.Tensor]
CHUNK: Final = {"cuda": 1 << 24, "cpu": 1 << 16}
"""Values of moments in 8 bits that are float32 at a time, with 30 bytes each on the way: on a GPU its kernels are long
by then (0.5 GB), on a CPU its cache has them."""


def create_optimizer(model: nn.Module, config: OptimizerConfig, *, on_host: bool = False) -> torch.optim.AdamW:
    """Decay on matrices only; biases and norm scales have none."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    groups = [
        {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    of_all: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps, "fused": True}
    if config.name is OptimizerName.ADAMW_8BIT:
        return AdamW8Bit(groups, on_host, **of_all)
    return SerialAdamW(groups, on_host, **of_all) if on_host else torch.optim.AdamW(groups, **of_all)


class SerialAdamW(torch.optim.AdamW):
    """A step has the moments of one tensor at a time where its weights are: the kernel and the numbers are AdamW's own.
    With `on_host` they lie in the host's memory, which of a GPU's is pinned, so that its link runs at full speed; all
    copies are in one stream, in order, and over when a step is."""

    def __init__(self, groups: list[dict[str, Any]], on_host: bool, **of_all: Any) -> None:
        super().__init__(groups, **of_all)
        self.on_host = on_host

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Without a closure."""
        assert closure is None
        devices = set()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)
                    devices.add(parameter.device)
        for device in devices:
            if device.type == "cuda":
                # Until then the host's memory has what was there before, and who saves reads it.
                torch.cuda.current_stream(device).synchronize()

    def _step_one(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(fresh_state(parameter, self))
        weights, gradient = local_part(parameter), local_part(parameter.grad)  # type: ignore[arg-type]
        held = {name: local_part(one) for name, one in state.items()}
        there = {name: one.to(weights.device, non_blocking=True) for name, one in held.items()}
        self._update(weights, gradient, there, group)
        for name, moved in there.items():
            if moved is not held[name]:
                held[name].copy_(moved, non_blocking=True)

    def _update(self, weights: torch.Tensor, gradient: torch.Tensor, state: State, group: dict[str, Any]) -> None:
        """In place, of a tensor's part here."""
        first, second = ([state[name]] for name in MOMENTS)
        beta1, beta2 = group["betas"]
        of_all = {name: group[name] for name in OF_KERNEL}
        adamw([weights], [gradient], first, second, [], [state[STEP]], beta1=beta1, beta2=beta2, **of_all)


class AdamW8Bit(SerialAdamW):
    """Keeps moments in 8 bits where a matrix's rows divide into blocks: they are float32 in a step alone, some rows at
    a time, and the step is AdamW's own on them."""

    def _update(self, weights: torch.Tensor, gradient: torch.Tensor, state: State, group: dict[str, Any]) -> None:
        if MOMENTS[0] + SCALE not in state:
            super()._update(weights, gradient, state, group)
            return
        rows = max(1, CHUNK[weights.device.type] // prod(weights.shape[1:]))
        for first in range(0, weights.shape[0], rows):
            part = slice(first, first + rows)
            held = {name: one[part] for name, one in state.items() if name != STEP}
            floats = {one: dequantize(held[one], held[one + SCALE], signed=one in SIGNED) for one in MOMENTS}
            super()._update(weights[part], gradient[part], {**floats, STEP: state[STEP].clone()}, group)
            for name, one in floats.items():
                quantize(one, held[name], held[name + SCALE], signed=name in SIGNED)
        state[STEP] += 1


def fresh_state(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> State:
    """State of a parameter before its first step, sharded as it is, where `optimizer` has it."""
    place: dict[str, Any] = {}
    if isinstance(optimizer, SerialAdamW) and optimizer.on_host and not parameter.is_meta:
        place = {"device": "cpu", "pin_memory": parameter.device.type == "cuda"}
    zeros: Callable[..., torch.Tensor] = partial(torch.zeros_like, requires_grad=False, **place)
    state = {STEP: torch.zeros((), dtype=torch.float32, device=parameter.device)}
    if not isinstance(optimizer, AdamW8Bit) or not in_blocks(parameter.shape):
        return {**state, **{name: zeros(parameter) for name in MOMENTS}}
    for name in MOMENTS:
        state[name] = zeros(parameter, dtype=torch.uint8)
        state[name + SCALE] = zeros(parameter[..., ::BLOCK])
    return state
