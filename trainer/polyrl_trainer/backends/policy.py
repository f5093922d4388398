"""A model on its device, with how it is fed: plans passes, packs, scores. Shared by learner and reference.

Always in eval mode: dropout would make the learner's logprobs those of another function than the engines compute.
Refuses to hold: gradients, optimizers (see `torch_backend`). Read next: `policy_forward`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from polyrl_trainer.backends.configs import Dtype, EngineConfig, ModelConfig
from polyrl_trainer.backends.model_factory import VARIABLE_LENGTH_ATTENTION, attention_for, load_model
from polyrl_trainer.backends.model_probe import probe_model
from polyrl_trainer.backends.packed_batch import PackedBatch, pack, unpack
from polyrl_trainer.backends.policy_forward import score
from polyrl_trainer.backends.sequence_packing import PackingPolicy, plan_passes
from polyrl_trainer.sample import Sample


@dataclass(frozen=True)
class Policy:
    """float32 weights; the forward pass runs in `dtype`."""

    model: PreTrainedModel
    device: torch.device
    dtype: Dtype
    packing: PackingPolicy
    max_logits_bytes: int

    def passes(self, samples: Sequence[Sample]) -> Iterator[PackedBatch]:
        """Every sample in exactly one pass. Raises ValueError for no samples, no tokens, or a learned first token."""
        if not samples:
            raise ValueError("a batch needs at least one sample")
        for one in plan_passes([sample.length for sample in samples], self.packing):
            yield pack(samples, one, self.device)

    def score(self, batch: PackedBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """float32[P] logprobs and float32[P] entropies (detached), see `policy_forward.score`."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == "bfloat16"):
            return score(self.model, batch, temperature, self.max_logits_bytes)

    @torch.no_grad()
    def log_probs(self, samples: Sequence[Sample], temperature: float) -> list[npt.NDArray[np.float32]]:
        """float32[T] per sample, in the order given; 0 where loss_mask is 0."""
        by_sample: dict[int, npt.NDArray[np.float32]] = {}
        for batch in self.passes(samples):
            values, _ = self.score(batch, temperature)
            by_sample.update(zip(batch.indices, unpack(batch, values), strict=True))
        return [by_sample[index] for index in range(len(samples))]


def create_policy(model: ModelConfig, engine: EngineConfig) -> Policy:
    """Loads, probes and places the model. Raises InvalidManifest or InvalidData for a source that cannot be trained."""
    loaded = load_model(model.source, model.seed, model.dtype, model.special_tokens)
    probe_model(loaded)
    device = torch.device(_device_name(engine.device))
    attention = attention_for(device, model.dtype)
    loaded.set_attn_implementation(attention)
    shape = PackingPolicy.variable_length if attention == VARIABLE_LENGTH_ATTENTION else PackingPolicy.dense
    loaded.to(device)  # type: ignore[arg-type]
    return Policy(
        model=loaded,
        device=device,
        dtype=model.dtype,
        packing=shape(engine.max_tokens_per_micro_batch),
        max_logits_bytes=engine.max_logits_bytes,
    )


def _device_name(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    return "cuda:0" if torch.cuda.is_available() else "cpu"
