"""The port between loops and whatever holds the model: a handful of calls, futures out.

A backend takes four configs (model, engine, optimizer, checkpoint), knows no algorithm, and is given the loss.
`forward_backward` accumulates gradients of *summed* losses; `optim_step(normalizer)` divides them, clips, steps and
zeroes. So a mini-batch may arrive in any number of micro-batches and its gradient is the same: the caller counts
samples or tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from polyrl.errors import PolyRLError
from polyrl.weights import TensorEntry
from polyrl_trainer.sample import Sample

TrainFuture = Future
"""Result or error of a call that a backend may run in the background; `result(timeout)` waits."""


@dataclass(frozen=True)
class LossInputs:
    """One pass over packed sequences, flattened to its P learned positions: those whose loss_mask is not 0.

    A sequence is never split over two passes, so a mean over a sequence can be taken here.
    """

    log_probs: torch.Tensor
    """float32[P], of the token at each position under the policy being trained, log_softmax(logits / temperature);
    carries the gradient."""
    entropy: torch.Tensor
    """float32[P], of the distribution that predicts each position; carries the gradient where `forward_backward` was
    asked for it."""
    mask: torch.Tensor
    """float32[P]"""
    rollout_log_probs: torch.Tensor
    """float32[P]; 0 where the samples carry none."""
    advantages: torch.Tensor
    """float32[P]; 0 where the samples carry none."""
    reference_log_probs: torch.Tensor
    """float32[P]; 0 where the samples carry none."""
    old_log_probs: torch.Tensor
    """float32[P]; 0 where the samples carry none."""
    sequence: torch.Tensor
    """int64[P], which sample of the micro-batch a position belongs to, 0-based."""
    num_sequences: int
    absent: frozenset[str] = frozenset()
    """Names of the optional `Sample` fields that at least one sample lacks; a loss that needs one of them refuses."""
    kept: torch.Tensor | None = None
    """float32[P], 0 at tokens of samples that are `left_out`, else 1; None where no sample is."""
    drawers: torch.Tensor | None = None
    """int64[P], see `Sample.drawers`; None where a sample has none."""
    old_values: torch.Tensor | None = None
    """float32[P], see `Sample.old_values`; None where a sample has none."""
    returns: torch.Tensor | None = None
    """float32[P], see `Sample.returns`; None where a sample has none."""
    values: torch.Tensor | None = None
    """float32[P], of a model with a value head: what it says of all before each position; carries the gradient. Then
    `log_probs` and `entropy` are 0. None of a language model."""


Loss = Callable[[LossInputs], tuple[torch.Tensor, dict[str, float]]]
"""Gives the summed loss (a scalar that carries the gradient) and named sums over learned tokens for the log.

A name that ends in `_max` is a maximum instead; `losses.merge` and `losses.averages` handle both kinds."""


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did."""

    grad_norm: float
    """Global norm after division by the normalizer, before clipping."""
    learning_rate: float
    not_finite: str = ""
    """The first tensor whose gradient was not finite: then no weight has changed."""


class BufferPlace(msgspec.Struct, frozen=True):
    """Memory of one of the learner's machines for bytes [begin, end) of a version's stream."""

    path: str
    """Where a process of the same account on that machine opens it."""
    name: str
    """A name that no other buffer on any machine has: what is opened by `path` elsewhere has another."""
    begin: int
    end: int


@dataclass(frozen=True)
class WeightsBuffer:
    """Memory for the bytes of one version, with whatever lies in it."""

    data: memoryview
    """uint8[end - begin] of the first place, which is on this machine."""
    places: tuple[BufferPlace, ...]
    """One of each machine of the learner; together they have every byte, and a few twice."""


BufferOf = Callable[[Sequence[TensorEntry]], WeightsBuffer]
"""Gives a buffer for tensors that lie so in the stream."""


class OtherMachines(Protocol):
    """A learner's machines but the first; each keeps its share of every weight version, and serves it to agents."""

    number: int

    def endpoints(self) -> tuple[str, ...]:
        """Where each machine serves weights, in order. Waits until all are known; raises OSError when one is not."""

    def ask(self, machine: int, request: bytes, within_s: float) -> bytes:
        """Sends `request` to machine number `machine`, the first of these being 0, and returns its answer. May be
        called from any thread. Raises OSError when none comes within `within_s` seconds, RunFailed with the machine's
        own words when it cannot do it."""

    def lost(self, error: OSError) -> PolyRLError:
        """The error that ends the run after `ask` raised `error`; it names what was lost, as far as is known."""


class TrainingBackend(Protocol):
    """Holds policy, optimizer and schedule.

    >>> from polyrl_trainer.backends.configs import CheckpointConfig, EngineConfig, ModelConfig, OptimizerConfig
    >>> from polyrl_trainer.backends.single_process import create_torch_backend
    >>> from polyrl_trainer.losses import sft_loss
    >>> model = {"model_type": "qwen2", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    >>> model |= {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    >>> optimizer = OptimizerConfig(learning_rate=0.5, total_steps=1)
    >>> source = ModelConfig(model, dtype="float32")
    >>> backend = create_torch_backend(source, EngineConfig("cpu"), optimizer, CheckpointConfig())
    >>> sample = Sample(np.array([1, 2, 3]), np.array([0, 1, 1], np.float32), prompt_length=1)
    >>> sums = backend.forward_backward([sample], sft_loss).result(timeout=60)
    >>> step = backend.optim_step(normalizer=sums["tokens"]).result(timeout=60)
    >>> sums["tokens"], step.learning_rate
    (2.0, 0.5)
    """

    def forward_backward(
        self,
        batch: Sequence[Sample],
        loss: Loss,
        temperature: float = 1.0,
        *,
        entropy_gradient: bool = False,
        together: int = 1,
    ) -> TrainFuture[dict[str, float]]:
        """Adds the gradient of `loss` over `batch`; resolves to the loss's named sums plus `loss`, `tokens` (learned),
        `positions` (computed), `padded_positions` (computed but unused) and their ratio `padding_fraction`; where the
        backend knows them, `flops` and `learn_seconds` of the call, and of the device `device_flops_max` (per second),
        `device_allocated_max` and `device_reserved_max` (bytes).
        So many consecutive samples reach the loss `together`, in one pass and next to each other: 2 for pairs.

        `temperature` is the one that the samples were drawn at (SamplingParams: 0 is greedy and scores at 1), so that
        the learner's logprobs and the engines' are those of the same distribution. SFT leaves it at 1.
        `entropy_gradient`: the loss has an entropy bonus, so `LossInputs.entropy` carries its gradient too.
        """

    def log_probs(
        self, batch: Sequence[Sample], temperature: float = 1.0
    ) -> TrainFuture[list[npt.NDArray[np.float32]]]:
        """float32[T] per sample, without gradient; 0 where loss_mask is 0."""

    def values(self, batch: Sequence[Sample]) -> TrainFuture[list[npt.NDArray[np.float32]]]:
        """float32[T] per sample, without gradient: what the value head says of all before each learned token; 0 where
        loss_mask is 0. Of a model with a value head only."""

    def optim_step(self, normalizer: float) -> TrainFuture[StepResult]:
        """Divides accumulated gradients by `normalizer` (> 0), clips, steps optimizer and schedule, zeroes."""

    def discard_gradients(self) -> TrainFuture[None]:
        """Forgets what was accumulated, as if the mini-batch had never begun; then `save` is possible again."""

    def export_weights(self, buffer: BufferOf) -> list[TensorEntry]:
        """Copies the weights of the newest step into a buffer for them, as one stream: Hugging Face names, the serving
        dtype, tied weights once. Where each tensor lies, without checksums; the buffer is whole before that."""

    def serving_files(self) -> dict[str, bytes]:
        """File name to content: what an engine's model folder needs besides weights and tokenizer."""

    def save(self, folder: Path, *, copied: bool = True) -> TrainFuture[None]:
        """Returns with a copy of model (safetensors), optimizer, schedule and RNG in the host's memory, which is then
        written into an existing empty folder, beside whatever is called next. The future has the end, or what the disk
        refused; then the folder is also a Hugging Face model folder: a later stage, or anyone else, can start from it.
        A save waits for the one before it. Not `copied`: nothing may be called before the future is done."""

    def state_bytes(self) -> int:
        """What `save` would write now, about."""

    def load(self, folder: Path) -> None:
        """Inverse of `save`, exact. Raises InvalidData naming the file that is missing or does not fit."""
