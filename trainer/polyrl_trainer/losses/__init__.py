"""Losses as pure functions of `LossInputs`: summed loss and named sums out, no model, no state.

Each formula stands in its function's docstring with its source; import from here, read `sft`, then `grpo`.
"""

from polyrl_trainer.losses.grpo import GrpoConfig, grpo_loss
from polyrl_trainer.losses.sft import averages, merge, sft_loss

__all__ = ["GrpoConfig", "averages", "grpo_loss", "merge", "sft_loss"]
