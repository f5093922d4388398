"""The frozen policy that a KL penalty compares with: scores, never learns.

It is made from the source that the stage started from, not copied from a running learner, so a resumed run compares
with the same reference as an undisturbed one. Read next: `policy`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from polyrl_trainer.backend import TrainFuture
from polyrl_trainer.backends.background import Background
from polyrl_trainer.backends.configs import EngineConfig, ModelConfig
from polyrl_trainer.backends.policy import create_policy
from polyrl_trainer.sample import Sample


class ReferencePolicy:
    """Gives `Sample.reference_log_probs`."""

    def __init__(self, model: ModelConfig, engine: EngineConfig) -> None:
        """Raises InvalidManifest or InvalidData for a source that cannot be scored."""
        self._policy = create_policy(model, engine)
        self._policy.model.requires_grad_(False)
        self._background = Background("reference policy", engine.threads, engine.wait_seconds)

    def log_probs(
        self, batch: Sequence[Sample], temperature: float = 1.0
    ) -> TrainFuture[list[npt.NDArray[np.float32]]]:
        """float32[T] per sample; 0 where loss_mask is 0. Same meaning as `TrainingBackend.log_probs`."""
        return self._background.submit(self._policy.log_probs, batch, temperature)

    def close(self) -> None:
        """Ends the background thread."""
        self._background.close()
