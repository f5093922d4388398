"""Optimizer state as named tensors: a reordered model is noticed instead of mixed up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from polyrl_trainer.backends.optimizers.adamw import fresh_state


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All but the frozen ones, of which the optimizer knows nothing."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """`KEY/PARAMETER` to tensor; empty before the first step."""
    return {
        f"{key}/{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def blank_state(model: nn.Module, optimizer: torch.optim.Optimizer, *, meta: bool = False) -> dict[str, torch.Tensor]:
    """For what `named_state` gives after a step, where the optimizer has it; with `meta` names, shapes and dtypes
    alone."""
    return {
        f"{key}/{name}": value
        for name, parameter in trained_parameters(model)
        for key, value in fresh_state(parameter.detach().to("meta" if meta else parameter.device), optimizer).items()
    }


def restore_state(model: nn.Module, optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor]) -> None:
    """Inverse of `named_state`; takes tensors over that lie where the optimizer has them."""
    optimizer.state.clear()
    if not named:
        return
    for name, parameter in trained_parameters(model):
        state = optimizer.state[parameter]
        for key, buffer in fresh_state(parameter.detach(), optimizer).items():
            found = named[f"{key}/{name}"]
            placed = found.device == buffer.device and (found.is_pinned() or not buffer.is_pinned())
            state[key] = found if placed else buffer.copy_(found)
