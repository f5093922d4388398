"""The single-process backend: one policy, AdamW, CPU or one GPU; the work runs on a thread of its own.

A mini-batch is exact: its gradient is the sum over all its samples, divided once, and if any part of it failed, no step
is taken.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog
import torch
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from polyrl.errors import InvalidData, RunFailed
from polyrl_trainer.backend import Loss, StepResult, TrainFuture, TrainingBackend
from polyrl_trainer.backends import lora, training_state
from polyrl_trainer.backends.configs import CheckpointConfig, EngineConfig, ModelConfig, OptimizerConfig
from polyrl_trainer.backends.device_load import MatrixSizes, device_numbers
from polyrl_trainer.backends.model_factory import load_model, serving_files
from polyrl_trainer.backends.packing import PackedBatch
from polyrl_trainer.backends.policy import Background, ModelBelowAdapters, Policy, create_policy
from polyrl_trainer.backends.training_state import MODEL_FILE, OPTIMIZER_FILE, RNG_FILE, VALUE_HEAD_FILE
from polyrl_trainer.backends.value_head import HEAD_WEIGHT
from polyrl_trainer.losses.sft import merge
from polyrl_trainer.sample import Sample

log = structlog.get_logger()

MAX_SKIPPED_IN_A_ROW = 5
"""Optimizer steps without a finite gradient, one after the other, that end the run. Gut feeling: a single batch may
overflow, weights that are broken always do."""


def create_torch_backend(
    model: ModelConfig, engine: EngineConfig, optimizer: OptimizerConfig, checkpoint: CheckpointConfig
) -> TorchBackend:
    """Loads the model and makes its backend. Raises InvalidManifest or InvalidData for a source that cannot be
    trained."""
    return TorchBackend(create_policy(model, engine), model, engine, optimizer=optimizer, checkpoint=checkpoint)


class TorchBackend(TrainingBackend):
    """Weights and optimizer state are float32."""

    def __init__(
        self,
        policy: Policy,
        model: ModelConfig,
        engine: EngineConfig,
        *,
        optimizer: OptimizerConfig,
        checkpoint: CheckpointConfig,
    ) -> None:
        self._policy = policy
        self._model = model
        self._base: str | None = None
        self._optimizer_config = optimizer
        self._checkpoint = checkpoint
        self._optimizer = create_optimizer(policy.model, optimizer)
        self._steps_taken = 0
        self._skipped = 0
        self._sizes = MatrixSizes.of(policy.model)
        self._has_gradient = False
        self._broken: str | None = None
        self._background = Background("learner", engine.threads, engine.wait_seconds)

    def forward_backward(
        self,
        batch: Sequence[Sample],
        loss: Loss,
        temperature: float = 1.0,
        *,
        entropy_gradient: bool = False,
        together: int = 1,
    ) -> TrainFuture[dict[str, float]]:
        """After an error in here, `optim_step` refuses until `load`: the gradient has a hole."""
        return self._background.submit(self._forward_backward, batch, loss, temperature, entropy_gradient, together)

    def log_probs(
        self, batch: Sequence[Sample], temperature: float = 1.0
    ) -> TrainFuture[list[npt.NDArray[np.float32]]]:
        return self._background.submit(self._policy.log_probs, batch, temperature)

    def values(self, batch: Sequence[Sample]) -> TrainFuture[list[npt.NDArray[np.float32]]]:
        return self._background.submit(self._policy.values, batch)

    def optim_step(self, normalizer: float) -> TrainFuture[StepResult]:
        """No weight changes when the gradient is not finite: the result names the tensor, and MAX_SKIPPED_IN_A_ROW such
        steps raise RunFailed. So does a gradient that is not whole; ValueError when there is none or the normalizer is
        not positive."""
        return self._background.submit(self._optim_step, normalizer)

    def discard_gradients(self) -> TrainFuture[None]:
        return self._background.submit(self._drop_gradients)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The copy is whole before the first tensor is given out; waits for queued work."""
        return iter(self._background.wait_for("a snapshot of the weights", self._snapshot))

    def serving_files(self) -> dict[str, bytes]:
        return serving_files(self._policy.model)

    def save(self, folder: Path) -> None:
        """Raises RunFailed within a mini-batch: gradients are not saved."""
        self._background.wait_for("a checkpoint to be written", self._save, folder)

    def load(self, folder: Path) -> None:
        """Drops accumulated gradients."""
        self._background.wait_for("a checkpoint to be read", self._load, folder)

    def below_adapters(self) -> ModelBelowAdapters:
        """The model that the adapters stand on, as a reference."""
        return ModelBelowAdapters(self._policy, self._background)

    def close(self) -> None:
        """Ends the background thread; queued work is dropped."""
        self._background.close()

    # --- below: on the background thread only -------------------------------------------------------------------------

    def _forward_backward(
        self, batch: Sequence[Sample], loss: Loss, temperature: float, entropy_gradient: bool, together: int
    ) -> dict[str, float]:
        total: dict[str, float] = {}
        began = time.monotonic()
        self._has_gradient = True
        try:
            with lora.dropout_on(self._policy.model):
                for packed in self._policy.passes(batch, together):
                    total = merge(total, self._one_pass(packed, loss, temperature, entropy_gradient))
        except BaseException as error:
            self._broken = f"a forward-backward pass of its mini-batch failed ({type(error).__name__}: {error})"
            raise
        return {**total, **device_numbers(self._policy.device), "learn_seconds": time.monotonic() - began}

    def _one_pass(
        self, packed: PackedBatch, loss: Loss, temperature: float, entropy_gradient: bool
    ) -> dict[str, float]:
        value, sums = loss(self._policy.loss_inputs(packed, temperature, entropy_gradient=entropy_gradient))
        value.backward()  # type: ignore[no-untyped-call]
        positions = packed.input_ids.numel()
        used = sum(sample.length for sample in packed.samples)
        counts = {"tokens": len(packed.targets), "positions": positions, "padded_positions": positions - used}
        flops = self._sizes.operations(used, len(packed.targets))
        numbers = {"loss": float(value.detach()), "flops": flops, **counts}
        return {**sums, **{name: float(number) for name, number in numbers.items()}}

    def _optim_step(self, normalizer: float) -> StepResult:
        if self._broken:
            raise RunFailed(f"optimizer step {self._steps_taken} was not taken: {self._broken}")
        if not self._has_gradient or not normalizer > 0:
            raise ValueError("optim_step needs a forward_backward before it and a positive normalizer")
        grad_norm = self._scale_and_clip(normalizer)
        rate = learning_rate_at(self._optimizer_config, self._steps_taken)
        if not math.isfinite(grad_norm):
            return self._skip(grad_norm, rate)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._drop_gradients()
        self._steps_taken += 1
        self._skipped = 0
        return StepResult(grad_norm=grad_norm, learning_rate=rate)

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
        self._drop_gradients()
        return StepResult(grad_norm=grad_norm, learning_rate=rate, not_finite=name)

    def _scale_and_clip(self, normalizer: float) -> float:
        """The global norm after division, before clipping; not finite: nothing is clipped."""
        parameters = [one for one in self._policy.model.parameters() if one.grad is not None]
        gradients = [one.grad for one in parameters if one.grad is not None]
        for gradient in gradients:
            gradient.div_(normalizer)
        norm = torch.nn.utils.get_total_norm(gradients)
        if math.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(parameters, self._optimizer_config.max_grad_norm, norm)
        return float(norm)

    def _first_not_finite(self) -> str:
        for name, parameter in self._policy.model.named_parameters():
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                return name
        return "no single tensor"

    def _drop_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._has_gradient = False
        self._broken = None

    def _snapshot(self) -> list[tuple[str, torch.Tensor]]:
        serving = getattr(torch, self._policy.dtype)
        return [
            (name, tensor.to("cpu", serving if tensor.is_floating_point() else tensor.dtype, copy=True))
            for name, tensor in self._published_state().items()
        ]

    def _published_state(self) -> dict[str, torch.Tensor]:
        """Detached tensors under the names of published Hugging Face checkpoints, tied weights once."""
        model = self._policy.model
        tied = {*model.all_tied_weights_keys, *self._own_value_head()}
        held = model.state_dict() if self._model.adapter is None else lora.merged_state(model)
        state: dict[str, torch.Tensor] = revert_weight_conversion(model, held)
        return {name: tensor.detach().contiguous() for name, tensor in state.items() if name not in tied}

    def _own_value_head(self) -> dict[str, torch.Tensor]:
        """Of a policy that is its own critic: no engine knows of it."""
        if self._policy.head != "both":
            return {}
        return {HEAD_WEIGHT: dict(self._policy.model.named_parameters())[HEAD_WEIGHT].detach()}

    def _save(self, folder: Path) -> None:
        if self._has_gradient:
            raise RunFailed(f"{folder}: a checkpoint cannot be written within a mini-batch, before its optimizer step")
        model, adapter = self._policy.model, self._model.adapter
        tensors = {
            OPTIMIZER_FILE: named_state(model, self._optimizer),
            RNG_FILE: self._generator_states(),
        }
        files = self.serving_files()
        if adapter is None or adapter.save_merged:
            tensors[MODEL_FILE] = self._published_state()
        if self._policy.head == "both":
            tensors[VALUE_HEAD_FILE] = self._own_value_head()
        if adapter is not None:
            tensors[lora.TENSORS_FILE] = lora.adapter_tensors(model)
            files[lora.CONFIG_FILE] = lora.adapter_config(model, adapter, self._model.source)
        training_state.write_checkpoint(
            folder, self._steps_taken, tensors, files, fsync=self._checkpoint.fsync, base=self._base_checksum()
        )

    def _base_checksum(self) -> str:
        if self._model.adapter is None:
            return ""
        self._base = self._base or lora.base_checksum(self._policy.model)
        return self._base

    def _load(self, folder: Path) -> None:
        state = training_state.read_state(folder)
        model = self._policy.model
        # Everything is read and checked before anything is changed.
        if state.base != self._base_checksum():
            raise InvalidData(
                f"{folder}: was not trained on the weights that this run's adapters stand on; recipe.model, its dtype"
                " among it, has to be what the run began with"
            )
        weights = self._read_weights(folder)
        optimizer = training_state.read_tensors(folder / OPTIMIZER_FILE, expected_state(model, stepped=state.step > 0))
        generators = training_state.read_tensors(folder / RNG_FILE, self._generator_states())
        if self._model.adapter is None:
            model.load_state_dict(weights)
        else:
            lora.load_adapter(model, weights)
            for name, parameter in self._own_value_head().items():
                parameter.copy_(weights[name])
        restore_state(model, self._optimizer, optimizer)
        torch.set_rng_state(generators["cpu"])
        if "cuda" in generators:
            torch.cuda.set_rng_state(generators["cuda"], self._policy.device)
        self._steps_taken = state.step
        self._drop_gradients()

    def _read_weights(self, folder: Path) -> Mapping[str, torch.Tensor]:
        """What learns; of an adapted model the adapters alone."""
        model, own = self._policy.model, self._own_value_head()
        head = training_state.read_tensors(folder / VALUE_HEAD_FILE, own) if own else {}
        if self._model.adapter is not None:
            adapters = training_state.read_tensors(folder / lora.TENSORS_FILE, lora.adapter_tensors(model))
            return {**adapters, **head}
        weights = load_model(folder, seed=0, dtype=self._policy.dtype, head=self._policy.head).state_dict() | head
        training_state.check_tensors(folder / MODEL_FILE, weights, model.state_dict())
        return weights

    def _generator_states(self) -> dict[str, torch.Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self._policy.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._policy.device)
        return states


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


# --- optimizer state as named tensors: a reordered model is noticed instead of mixed up -------------------------------

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


def expected_state(model: nn.Module, stepped: bool) -> dict[str, torch.Tensor]:
    """What `named_state` gives of this model after a step: meta tensors of the right names, shapes and dtypes."""
    if not stepped:
        return {}
    scalar = torch.empty((), dtype=torch.float32, device="meta")
    expected: dict[str, torch.Tensor] = {}
    for name, parameter in trained_parameters(model):
        expected |= {f"{moment}/{name}": torch.empty_like(parameter, device="meta") for moment in MOMENTS}
        expected[f"{STEP}/{name}"] = scalar
    return expected


def restore_state(model: nn.Module, optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor]) -> None:
    """Inverse of `named_state`."""
    optimizer.state.clear()
    if not named:
        return
    for name, parameter in trained_parameters(model):
        optimizer.state[parameter] = {key: named[f"{key}/{name}"].to(parameter.device) for key in (STEP, *MOMENTS)}
