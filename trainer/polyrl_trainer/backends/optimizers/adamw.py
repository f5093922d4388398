"""AdamW, and the same with its moments in the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.optim.adamw import adamw

from polyrl_trainer.backends.configs import OptimizerConfig
from polyrl_trainer.backends.fsdp.shard_files import local_part

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
STEP: Final = "step"


def create_optimizer(model: nn.Module, config: OptimizerConfig, *, on_host: bool = False) -> torch.optim.AdamW:
    """Decay on matrices only; biases and norm scales have none."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    groups = [
        {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    kind = HostAdamW if on_host else torch.optim.AdamW
    return kind(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


class HostAdamW(torch.optim.AdamW):
    """The moments lie in the host's memory, and a step has those of one tensor at a time where its weights are: the
    kernel and the numbers are AdamW's own. Of a GPU's the memory is pinned, so that its link runs at full speed; all
    copies are in one stream, in order, and over when a step is."""

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
            state.update(fresh_state(parameter, on_host=True))
        weights, gradient = local_part(parameter), local_part(parameter.grad)  # type: ignore[arg-type]
        held = [local_part(state[name]) for name in MOMENTS]
        there = [one.to(weights.device, non_blocking=True) for one in held]
        adamw(
            [weights],
            [gradient],
            exp_avgs=[there[0]],
            exp_avg_sqs=[there[1]],
            max_exp_avg_sqs=[],
            state_steps=[state[STEP]],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for one, moved in zip(held, there, strict=True):
            if moved is not one:
                one.copy_(moved, non_blocking=True)


def fresh_state(parameter: torch.Tensor, *, on_host: bool) -> dict[str, torch.Tensor]:
    """Of a parameter before its first step, sharded as it is."""
    state = {name: _zeros_on_host(parameter) if on_host else torch.zeros_like(parameter) for name in MOMENTS}
    return {STEP: torch.zeros((), dtype=torch.float32, device=parameter.device), **state}


def _zeros_on_host(parameter: torch.Tensor) -> torch.Tensor:
    pinned = parameter.device.type == "cuda"
    return torch.zeros_like(parameter, device="cpu", pin_memory=pinned, requires_grad=False)
