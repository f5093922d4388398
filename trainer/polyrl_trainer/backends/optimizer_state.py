"""AdamW, and its state as named tensors. Names rather than indices: a reordered model is noticed instead of mixed up.

Refuses to hold: the schedule (see `schedule`), files (see `checkpoint_files`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from polyrl_trainer.backends.configs import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"


def create_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Decay on matrices only; biases and norm scales have none."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    groups = [
        {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """`KEY/PARAMETER` to tensor; empty before the first step."""
    return {
        f"{key}/{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def expected_state(model: nn.Module, stepped: bool) -> dict[str, torch.Tensor]:
    """What `named_state` gives of this model after a step: meta tensors of the right names, shapes and dtypes."""
    if not stepped:
        return {}
    scalar = torch.empty((), dtype=torch.float32, device="meta")
    expected: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        expected |= {f"{moment}/{name}": torch.empty_like(parameter, device="meta") for moment in MOMENTS}
        expected[f"{STEP}/{name}"] = scalar
    return expected


def restore_state(model: nn.Module, optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor]) -> None:
    """Inverse of `named_state`."""
    optimizer.state.clear()
    if not named:
        return
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {key: named[f"{key}/{name}"].to(parameter.device) for key in (STEP, *MOMENTS)}
