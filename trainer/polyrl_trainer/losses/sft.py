"""The supervised loss, and how the named numbers of all losses add up, however a mini-batch was split."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from polyrl_trainer.backend import LossInputs

MAX_SUFFIX = "_max"

COUNTS = frozenset({"loss", "tokens", "positions", "padded_positions", "flops", "learn_seconds"})
"""Sums that `averages` does not divide by tokens."""


def as_floats(values: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Scalars to floats with one transfer from the device."""
    return dict(zip(values, torch.stack([value.detach().float() for value in values.values()]).tolist(), strict=True))


def merge(total: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """The numbers of both parts together: sums add, of names that end in `_max` the larger counts."""
    merged = dict(total)
    for name, value in more.items():
        if name not in merged:
            merged[name] = value
        elif name.endswith(MAX_SUFFIX):
            merged[name] = max(merged[name], value)
        else:
            merged[name] += value
    if merged.get("positions"):
        merged["padding_fraction"] = merged["padded_positions"] / merged["positions"]
    return merged


def averages(sums: Mapping[str, float]) -> dict[str, float]:
    """Sums over tokens divided by `tokens`; maxima, counts and `padding_fraction` as they are."""
    kept = COUNTS | {"padding_fraction"}
    tokens = max(1.0, sums.get("tokens", 0.0))
    return {
        name: value if name in kept or name.endswith(MAX_SUFFIX) else value / tokens for name, value in sums.items()
    }


def sft_loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, float]]:
    """L = - sum_p mask_p * log pi(y_p | y_<p), a scalar.

    The sum form: the optimizer step's normalizer is the number of learned tokens of the mini-batch, so that each token
    weighs the same, however the mini-batch was split. Sums: `entropy`.
    """
    loss = -(inputs.mask * inputs.log_probs).sum()
    return loss, as_floats({"entropy": (inputs.mask * inputs.entropy).sum()})
