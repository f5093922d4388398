"""The learning rate as a function of the step: nothing to save, nothing to drift on resume.

Refuses to hold: the optimizer. Read next: `torch_backend`.
"""

from __future__ import annotations

import math

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
