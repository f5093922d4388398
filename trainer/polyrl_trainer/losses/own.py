"""What the user may write in place of a named loss or advantage; `user_code.own_algorithm` makes them of functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from polyrl_trainer.backend import LossInputs
from polyrl_trainer.sample import Sample

TokenLoss = Callable[[LossInputs], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
"""float32[P], what each learned token adds to the loss, and float32[P] of each number for the log."""

GroupAdvantage = Callable[[Sequence[Sample]], Sequence[npt.NDArray[np.float64]]]
"""Advantages of all samples of one prompt, float64[T] each; `reward` is what they are of, penalties taken off."""


@dataclass(frozen=True)
class OwnAlgorithm:
    """None for what the manifest leaves to `algorithm.name`."""

    loss: TokenLoss | None = None
    advantage: GroupAdvantage | None = None


NOTHING_OWN: Final = OwnAlgorithm()
