"""The single-process backend: one policy, AdamW, CPU or one GPU; the work runs on a thread of its own.

A mini-batch is exact: its gradient is the sum over all its samples, divided once, and if any part of it failed, no step
is taken.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers.core_model_loading import revert_weight_conversion

from polyrl.errors import InvalidData, RunFailed
from polyrl.manifest.spec import CpuOffload
from polyrl.weights import TensorEntry
from polyrl_trainer.backend import BufferOf, Loss, StepResult, TrainFuture
from polyrl_trainer.backends import training_state
from polyrl_trainer.backends.configs import CheckpointConfig, EngineConfig, ModelConfig, OptimizerConfig
from polyrl_trainer.backends.device_load import MatrixSizes, device_numbers, give_back
from polyrl_trainer.backends.learners import Learner, Learners
from polyrl_trainer.backends.models import lora
from polyrl_trainer.backends.models.model_factory import load_model, serving_files
from polyrl_trainer.backends.models.value_head import HEAD_WEIGHT
from polyrl_trainer.backends.optimizers.named_state import blank_state, named_state, restore_state
from polyrl_trainer.backends.packing import PackedBatch, loss_inputs
from polyrl_trainer.backends.policy import Background, ModelBelowAdapters, Policy, ReferencePolicy, create_policy
from polyrl_trainer.backends.saved_state import SavedState
from polyrl_trainer.backends.training_state import MODEL_FILE, OPTIMIZER_FILE, RNG_FILE, VALUE_HEAD_FILE
from polyrl_trainer.backends.updates import Updates
from polyrl_trainer.backends.weight_stream import write_stream
from polyrl_trainer.losses.sft import merge
from polyrl_trainer.sample import Sample


def create_torch_backend(
    model: ModelConfig, engine: EngineConfig, optimizer: OptimizerConfig, checkpoint: CheckpointConfig
) -> TorchBackend:
    """Loads the model and makes its backend. Raises InvalidManifest or InvalidData for a source that cannot be
    trained."""
    return TorchBackend(create_policy(model, engine), model, engine, optimizer=optimizer, checkpoint=checkpoint)


class SingleProcess(Learners):
    """All learners in this process, on one device."""

    def learner(self, model: ModelConfig, engine: EngineConfig, optimizer: OptimizerConfig) -> TorchBackend:
        return create_torch_backend(model, engine, optimizer, CheckpointConfig())

    def reference(self, model: ModelConfig, engine: EngineConfig) -> ReferencePolicy:
        return ReferencePolicy(model, engine)

    @property
    def machines(self) -> None:
        """There are no others."""

    async def gather(self) -> None:
        """Nobody else is awaited."""

    async def watch(self) -> None:
        """Nobody else can be lost."""
        await asyncio.Event().wait()

    def close(self, *, done: bool = False) -> None:
        """Nothing is shared."""


class TorchBackend(Learner):
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
        self._checkpoint = checkpoint
        self._shares = engine.shares_device
        on_host = engine.cpu_offload is CpuOffload.OPTIMIZER
        self._updates = Updates(policy.model, optimizer, moments_on_host=on_host)
        self._sizes = MatrixSizes.of(policy.model)
        self._background = Background("learner", engine.threads, engine.wait_seconds)
        self._saved = SavedState(engine.wait_seconds)

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
        return self._background.submit(self._step, normalizer)

    def discard_gradients(self) -> TrainFuture[None]:
        return self._background.submit(self._updates.drop_gradients)

    def export_weights(self, buffer: BufferOf) -> list[TensorEntry]:
        """Waits for queued work."""
        return self._background.wait_for("a snapshot of the weights", self._export, buffer)

    def serving_files(self) -> dict[str, bytes]:
        return serving_files(self._policy.model)

    def save(self, folder: Path, *, copied: bool = True) -> TrainFuture[None]:
        """Raises RunFailed within a mini-batch: gradients are not saved."""
        return self._background.wait_for("a copy of the learner's state", self._save, folder, copied)

    def state_bytes(self) -> int:
        """Bytes of a save; where adapters are saved alone, of theirs."""
        adapter, model = self._model.adapter, self._policy.model
        whole = adapter is None or adapter.save_merged
        weights = (one for one in model.parameters() if whole or one.requires_grad)
        return training_state.size_of([*weights, *named_state(model, self._updates.optimizer).values()])

    def load(self, folder: Path) -> None:
        """Drops accumulated gradients."""
        self._background.wait_for("a checkpoint to be read", self._load, folder)

    def below_adapters(self) -> ModelBelowAdapters:
        """The model that the adapters stand on, as a reference."""
        return ModelBelowAdapters(self._policy, self._background)

    def close(self) -> None:
        """Ends the background thread; queued work is dropped, but a save is written to its end."""
        self._background.close()

    # --- below: on the background thread only -------------------------------------------------------------------------

    def _forward_backward(
        self, batch: Sequence[Sample], loss: Loss, temperature: float, entropy_gradient: bool, together: int
    ) -> dict[str, float]:
        total: dict[str, float] = {}
        began = time.monotonic()
        self._updates.passes += 1
        drawn = (self._model.seed, self._updates.steps_taken, self._updates.passes)
        try:
            with lora.dropout_on(self._policy.model, self._policy.device, drawn):
                for packed in self._policy.passes(batch, together):
                    total = merge(total, self._one_pass(packed, loss, temperature, entropy_gradient))
        except BaseException as error:
            self._updates.give_up(error)
            raise
        self._make_room()
        return {**total, **device_numbers(self._policy.device), "learn_seconds": time.monotonic() - began}

    def _step(self, normalizer: float) -> StepResult:
        taken = self._updates.step(normalizer)
        self._make_room()
        return taken

    def _make_room(self) -> None:
        if self._shares:
            give_back(self._policy.device)

    def _one_pass(
        self, packed: PackedBatch, loss: Loss, temperature: float, entropy_gradient: bool
    ) -> dict[str, float]:
        outputs = self._policy.outputs(packed, temperature, entropy_gradient=entropy_gradient)
        value, sums = loss(loss_inputs(packed.samples, packed.sequence, *outputs))
        value.backward()  # type: ignore[no-untyped-call]
        positions = packed.input_ids.numel()
        lengths = [sample.length for sample in packed.samples]
        used = sum(lengths)
        counts = {"tokens": len(packed.targets), "positions": positions, "padded_positions": positions - used}
        flops = self._sizes.operations(lengths, len(packed.targets))
        numbers = {"loss": float(value.detach()), "flops": flops, **counts}
        return {**sums, **{name: float(number) for name, number in numbers.items()}}

    def _export(self, buffer: BufferOf) -> list[TensorEntry]:
        return write_stream(self._published_state(), buffer, getattr(torch, self._policy.dtype))

    def _published_state(self) -> dict[str, torch.Tensor]:
        """Detached tensors under the names of published Hugging Face checkpoints, tied weights once."""
        model = self._policy.model
        tied = {*model.all_tied_weights_keys, *self._own_value_head()}
        held = model.state_dict() if self._model.adapter is None else lora.merged_state(model)
        state: dict[str, torch.Tensor] = revert_weight_conversion(model, held)
        return {name: tensor.detach().contiguous() for name, tensor in state.items() if name not in tied}

    def _own_value_head(self) -> dict[str, torch.Tensor]:
        """The value head of a policy that is its own critic: no engine knows of it."""
        if self._policy.head != "both":
            return {}
        return {HEAD_WEIGHT: dict(self._policy.model.named_parameters())[HEAD_WEIGHT].detach()}

    def _save(self, folder: Path, copied: bool) -> TrainFuture[None]:
        if self._updates.passes:
            raise RunFailed(f"{folder}: a checkpoint cannot be written within a mini-batch, before its optimizer step")
        model, adapter = self._policy.model, self._model.adapter
        generators = training_state.generator_states(self._policy.device)
        tensors = {OPTIMIZER_FILE: named_state(model, self._updates.optimizer), RNG_FILE: generators}
        files = self.serving_files()
        if adapter is None or adapter.save_merged:
            tensors[MODEL_FILE] = self._published_state()
        if self._policy.head == "both":
            tensors[VALUE_HEAD_FILE] = self._own_value_head()
        if adapter is not None:
            tensors[lora.TENSORS_FILE] = lora.adapter_tensors(model)
            files[lora.CONFIG_FILE] = lora.adapter_config(model, adapter)
        training_state.require_empty(folder)
        writing = partial(
            training_state.write_checkpoint,
            folder,
            self._updates.steps_taken,
            files=files,
            fsync=self._checkpoint.fsync,
            base=self._base_checksum(),
        )
        return self._saved.write(tensors, lambda held: writing(tensors=held), copied=copied)

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
            raise InvalidData(training_state.other_base(folder))
        weights = self._read_weights(folder)
        moments = blank_state(model, self._updates.optimizer, meta=True) if state.step else {}
        optimizer = training_state.read_tensors(folder / OPTIMIZER_FILE, moments)
        training_state.restore_generators(folder / RNG_FILE, self._policy.device)
        if self._model.adapter is None:
            model.load_state_dict(weights)
        else:
            lora.load_adapter(model, weights)
            for name, parameter in self._own_value_head().items():
                parameter.copy_(weights[name])
        restore_state(model, self._updates.optimizer, optimizer)
        self._updates.steps_taken = state.step
        self._updates.drop_gradients()

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
