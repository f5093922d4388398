"""An optimizer step: division, clipping, AdamW, its schedule, and what is done about a gradient that is not finite.

Of a model whose parameters are sharded over ranks, every rank calls the same at the same time: the norm is a sum over
all of them.
"""

from __future__ import annotations

import math

import structlog
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from polyrl.errors import RunFailed
from polyrl_trainer.backend import StepResult
from polyrl_trainer.backends.configs import OptimizerConfig
from polyrl_trainer.backends.optimizers.adamw import create_optimizer

log = structlog.get_logger()

MAX_SKIPPED_IN_A_ROW = 5
"""Optimizer steps without a finite gradient, one after the other, that end the run. Gut feeling: a single batch may
overflow, weights that are broken always do."""


class Updates:
    """The optimizer of one model, and where its schedule stands."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, *, moments_on_host: bool = False) -> None:
        """See `optimizers.adamw.SerialAdamW`."""
        self._model = model
        self._config = config
        self.optimizer = create_optimizer(model, config, on_host=moments_on_host)
        self.steps_taken = 0
        self.passes = 0
        """Accumulated since the last step."""
        self._skipped = 0
        self._broken: str | None = None

    def give_up(self, error: BaseException) -> None:
        """The accumulated gradient has a hole: no step is taken until `drop_gradients`."""
        self._broken = f"a forward-backward pass of its mini-batch failed ({type(error).__name__}: {error})"

    def step(self, normalizer: float) -> StepResult:
        """No weight changes when the gradient is not finite: the result names the tensor, and MAX_SKIPPED_IN_A_ROW such
        steps raise RunFailed. So does a gradient that is not whole; ValueError when there is none or the normalizer is
        not positive."""
        self.require_gradient(normalizer)
        grad_norm = self._scale_and_clip(normalizer)
        rate = learning_rate_at(self._config, self.steps_taken + self._config.ahead)
        if not math.isfinite(grad_norm):
            return self._skip(grad_norm, rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.drop_gradients()
        self.steps_taken += 1
        self._skipped = 0
        return StepResult(grad_norm=grad_norm, learning_rate=rate)

    def require_gradient(self, normalizer: float) -> None:
        """Raises what `step` raises before it does anything."""
        if self._broken:
            raise RunFailed(f"optimizer step {self.steps_taken} was not taken: {self._broken}")
        if not self.passes or not normalizer > 0:
            raise ValueError("optim_step needs a forward_backward before it and a positive normalizer")

    def drop_gradients(self) -> None:
        """As if the mini-batch had never begun."""
        self.optimizer.zero_grad(set_to_none=True)
        self.passes = 0
        self._broken = None

    def _skip(self, grad_norm: float, rate: float) -> StepResult:
        """One batch that overflows costs its step; several in a row are no accident any more."""
        self._skipped += 1
        name = self._first_not_finite()
        log.warning("optimizer step skipped", gradient_norm=grad_norm, first_seen_in=name, in_a_row=self._skipped)
        if self._skipped >= MAX_SKIPPED_IN_A_ROW:
            self._broken = f"the norm of its gradient is {grad_norm}, first seen in {name}"
            raise RunFailed(
                f"{self._skipped} optimizer steps in a row were not taken: {self._broken}; a lower learning rate"
                " or recipe.model.dtype float32 may help"
            )
        self.drop_gradients()
        return StepResult(grad_norm=grad_norm, learning_rate=rate, not_finite=name)

    def _scale_and_clip(self, normalizer: float) -> float:
        """The global norm after division, before clipping; not finite: nothing is clipped."""
        parameters = [one for one in self._model.parameters() if one.grad is not None]
        gradients = [one.grad for one in parameters if one.grad is not None]
        for gradient in gradients:
            gradient.div_(normalizer)
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        if math.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(parameters, self._config.max_grad_norm, norm)
        return float(norm)

    def _first_not_finite(self) -> str:
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None and not bool(whole(parameter.grad.isfinite().all())):
                return name
        return "no single tensor"


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be sharded; then every rank has to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# --- the learning rate as a function of the step: nothing to save, nothing to drift on resume -------------------------


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
