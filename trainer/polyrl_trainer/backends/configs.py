"""The four configs that every backend takes: model, engine, optimizer, checkpoint. Frozen, checked when made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from polyrl.history.model_card import base_model
from polyrl.manifest.parts.optimizer import OptimizerName, OptimizerSpec
from polyrl.manifest.recipe import ActivationCheckpointing, ModelSpec
from polyrl.manifest.spec import CpuOffload

Dtype = Literal["float32", "bfloat16"]
Head = Literal["tokens", "value", "both"]
"""What stands on the trunk: a language model's vocabulary, one number (see `value_head`), or both, side by side."""


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that the tokenizer knows and a fresh model's config does not."""

    pad: int | None = None
    bos: int | None = None
    eos: int | None = None
    ends: tuple[int, ...] = ()
    """All that end an answer, such as the chat template's end of a turn."""


@dataclass(frozen=True)
class AdapterConfig:
    """Low-rank adapters, see `lora`."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...] = ()
    """Last names of linear layers; empty: all but the head."""
    dropout: float = 0.0
    """In `forward_backward` alone."""
    save_merged: bool = True
    """A checkpoint holds the merged model too."""
    base: str | None = None
    """What whoever reads a checkpoint calls the model below; None: it has no name."""

    @classmethod
    def from_manifest(cls, model: ModelSpec) -> AdapterConfig | None:
        """The manifest's fields."""
        if (lora := model.lora) is None:
            return None
        base = None if model.path is None else base_model(model)
        return cls(**{**lora.model_dump(), "target_modules": tuple(lora.target_modules)}, base=base)


@dataclass(frozen=True)
class ModelConfig:
    """Which policy."""

    source: Path | Mapping[str, Any]
    """A Hugging Face folder (a checkpoint is one too), or the fields of a transformers config for a fresh model."""
    seed: int = 0
    """Draws the weights of a fresh model; without effect on a folder."""
    dtype: Dtype = "bfloat16"
    """Type of the forward pass and of the exported weights. Master weights are always float32."""
    special_tokens: SpecialTokens = SpecialTokens()
    """Written into a fresh model's config; a folder's own ids are left as they are, and its generation config gets the
    ends that it lacks."""
    vocabulary: int | None = None
    """The tokenizer's number of tokens: a fresh model's, unless its config says `vocab_size`."""
    head: Head = "tokens"
    """`value` for a critic or a reward model, `both` for a policy that is its own critic; a language model's folder
    then gives the trunk."""
    adapter: AdapterConfig | None = None
    """Given: the model stays as it is, and adapters on it learn; `seed` draws their weights."""


@dataclass(frozen=True)
class EngineConfig:
    """How the compute is done; changes speed and memory, never the mathematics."""

    device: str = "auto"
    """`auto` takes the first GPU if there is one; else a torch device such as `cpu` or `cuda:0`."""
    threads: int = 1
    """CPU threads of the learner."""
    max_tokens_per_micro_batch: int = 16384
    """Budget of one pass, padding included; a single longer sequence still makes a pass of its own."""
    max_logits_bytes: int = 256 << 20
    """Room for float32 logits of one chunk: positions x vocabulary x 4 bytes. Above it the vocabulary head runs in
    chunks and is computed again in the backward pass. 256 MiB is 440 positions of a 152k vocabulary."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE
    """What is kept of a block's activations; the rest is computed again in the backward pass."""
    context_parallel: int = 1
    """Ranks that have each pass together, every one an equal slice of its tokens; divides their number."""
    shares_device: bool = False
    """Engines take the GPU in turns with the learner: between passes it keeps no memory that it does not use."""
    compile_by: Literal["", "inductor", "aot_eager"] = ""
    """Backend of torch.compile for the blocks; empty: they are not compiled. `aot_eager` makes no kernels."""
    cpu_offload: CpuOffload = CpuOffload.NONE
    """What is in the host's memory: the optimizer's moments, or, of ranks, weights and gradients too, a layer's weights
    on the GPU while it computes."""
    dp_replicate: int = 1
    """Copies of the model that the ranks have, each in shards over its part of them."""
    wait_seconds: float = 1800.0
    """Deadline of the calls that wait for all queued work (export, save, load)."""

    def __post_init__(self) -> None:
        if min(self.threads, self.max_tokens_per_micro_batch, self.max_logits_bytes) < 1:
            raise ValueError("threads, max_tokens_per_micro_batch and max_logits_bytes must be at least 1")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101) and its schedule."""

    learning_rate: float
    total_steps: int
    """Optimizer steps of the stage; cosine and linear schedules reach 0 after them, `constant` ignores it."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0
    """Steps in which the rate climbs linearly to `learning_rate`."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Applied to matrices only, not to biases and norms."""
    max_grad_norm: float = 1.0
    """Global norm at which gradients are clipped."""
    name: OptimizerName = OptimizerName.ADAMW
    """How the moments are held."""
    ahead: int = 0
    """Steps by which the schedule is further than what was taken: of a run that goes on with fewer to a stage's step it
    is negative."""

    @classmethod
    def from_manifest(cls, optimizer: OptimizerSpec, total_steps: int, ahead: int = 0) -> OptimizerConfig:
        """The manifest's fields and the length of the stage, in optimizer steps."""
        return cls(total_steps=total_steps, ahead=ahead, **optimizer.model_dump())


@dataclass(frozen=True)
class CheckpointConfig:
    """How `save` writes."""

    fsync: bool = True
    """Files are on the disk, not only in its cache, when `save` returns."""
