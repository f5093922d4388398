"""Packed tokens in, log-probabilities and entropies of the learned positions out, in bounded memory.

Only the positions that predict a learned token reach the vocabulary head, in chunks whose float32 logits fit a stated
room. When more than one chunk is needed for training, each chunk's logits are computed again in the backward pass
instead of being kept (Chen et al. 2016, arXiv 1604.06174), so memory does not grow with positions x vocabulary.

Shapes: R rows, L width, H hidden size, V vocabulary, P learned positions, C positions of a chunk.
Refuses to hold: gradients, losses. Read next: `torch_backend`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from polyrl_trainer.backends.packed_batch import PackedBatch

LOGIT_BYTES = 4
"""Logits become float32 before log_softmax, whatever the dtype of the head: bfloat16 logprobs are off by 1 %."""


def score(
    model: PreTrainedModel, batch: PackedBatch, temperature: float, max_logits_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32[P] log_softmax(logits / temperature) of the learned tokens, and float32[P] entropies (detached)."""
    hidden_PH = hidden_states(model, batch.input_ids, batch.position_ids).flatten(0, 1)[batch.predicting]
    head = vocabulary_head(model)
    scale = 1.0 / effective_temperature(temperature)
    chunk = max(1, max_logits_bytes // (LOGIT_BYTES * model.config.get_text_config().vocab_size))
    parts = []
    for hidden_CH, targets in zip(torch.split(hidden_PH, chunk), torch.split(batch.targets, chunk), strict=True):
        if torch.is_grad_enabled() and len(hidden_PH) > chunk:
            parts.append(checkpoint(_score_chunk, head, hidden_CH, targets, scale, use_reentrant=False))
        else:
            parts.append(_score_chunk(head, hidden_CH, targets, scale))
    return torch.cat([log_probs for log_probs, _ in parts]), torch.cat([entropy for _, entropy in parts])


def hidden_states(model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """[R, L, H] of the last layer, after the final norm; sequences are told apart by position ids alone."""
    output = model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
    hidden: torch.Tensor = output.last_hidden_state
    return hidden


def vocabulary_head(model: PreTrainedModel) -> nn.Module:
    """The layer from hidden states to logits."""
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head


def effective_temperature(temperature: float) -> float:
    """Greedy sampling (0) reports logprobs at temperature 1, see `SamplingParams`. Raises ValueError below 0."""
    if temperature < 0:
        raise ValueError(f"temperature must be at least 0, not {temperature}")
    return temperature or 1.0


def _score_chunk(
    head: nn.Module, hidden_CH: torch.Tensor, targets: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_CV = head(hidden_CH).float() * scale
    log_probs_CV = torch.log_softmax(logits_CV, dim=-1)
    log_probs = log_probs_CV.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        entropy = -(log_probs_CV.exp() * log_probs_CV).sum(-1)
    return log_probs, entropy
