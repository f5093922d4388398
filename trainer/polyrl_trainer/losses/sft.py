"""Supervised loss: cross-entropy on the tokens that the mask marks. Read next: `grpo`."""

from __future__ import annotations

import torch

from polyrl_trainer.backend import LossInputs
from polyrl_trainer.losses.metrics import as_floats


def sft_loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, float]]:
    """L = - sum_p mask_p * log pi(y_p | y_<p), a scalar.

    The sum form: the optimizer step's normalizer is the number of learned tokens of the mini-batch, so that each token
    weighs the same, however the mini-batch was split. Sums: `entropy`.
    """
    loss = -(inputs.mask * inputs.log_probs).sum()
    return loss, as_floats({"entropy": (inputs.mask * inputs.entropy).sum()})
