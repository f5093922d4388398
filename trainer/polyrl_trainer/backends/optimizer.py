"""AdamW, its learning rate as a function of the step, and its state as named tensors.

The rate is a function: nothing to save, nothing to drift on resume. State goes by names rather than indices: a
reordered model is noticed instead of mixed up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from polyrl_trainer.backends.configs import OptimizerConfig


def learning_rate_at(config: OptimizerConfig, step: int) -> float:
    """Rate of optimizer step `step` (0-based).

    Warm-up: rate * (step + 1) / (warmup_steps + 1), so that no step is taken at rate 0.
    After it, with p in [0, 1] the share of the remaining steps taken: constant 1, linear 1 - p,
    cosine (1 + cos(pi p)) / 2 (Loshchilov and Hutter 2017, arXiv 1608.03983).
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    return config.learning_rate * _decay(config, step)


def _decay(config: OptimizerConfig, step: int) -> float:
    decaying_steps = max(1, config.total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decaying_steps)
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return (1.0 + math.cos(math.pi * progress)) / 2


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
