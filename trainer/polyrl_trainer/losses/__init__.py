"""Losses as pure functions of `LossInputs`: summed loss and named sums out, no model, no state.

Each formula stands in its function's docstring with its source; import from here, read `sft`, then `grpo`.
A new one is a file here, a name in `AlgorithmSpec` and a row in `POLICY_LOSSES`.
"""

from functools import partial
from typing import Final

from polyrl.manifest.recipe import AlgorithmSpec
from polyrl_trainer.backend import Loss
from polyrl_trainer.losses.grpo import grpo
from polyrl_trainer.losses.sft import averages, merge, sft_loss

__all__ = ["averages", "merge", "policy_loss", "sft_loss"]

POLICY_LOSSES: Final = {"grpo": grpo}
"""By `AlgorithmSpec.name`."""


def policy_loss(algorithm: AlgorithmSpec) -> Loss:
    """The loss that the manifest's algorithm names, with its numbers filled in."""
    return partial(POLICY_LOSSES[algorithm.name], algorithm=algorithm)
