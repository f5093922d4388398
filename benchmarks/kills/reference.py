"""What undisturbed greedy decoding gives: plain transformers' `generate`, all prompts in one batch without padding.

Prompts are chosen so that the best token always leads by LEAD: float32 sums differ in their last bits from engine to
engine, and where two tokens tie nobody is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from polyrl_trainer.backends.models.model_factory import load_model

LEAD: Final = 1e-3
"""Between the two best logits; a hundred times the noise of float32 on models of this size."""

CANDIDATES: Final = 4
"""Prompts drawn for one that is used: of responses of 400 tokens half are without a near tie, of 800 a third."""


@dataclass(frozen=True)
class Reference:
    """P prompts and what follows each."""

    prompts: list[list[int]]
    ids: list[list[int]]
    """[P][T]"""
    logprobs: list[list[float]]
    """[P][T], of log_softmax(logits)."""


@torch.no_grad()
def decode(config: Mapping[str, Any], seed: int, count: int, prompt_tokens: int, tokens: int) -> Reference:
    """`count` prompts of the model that `config` and `seed` make. Raises ValueError when too few are clear enough."""
    torch.set_num_threads(1)  # where cores are shared, threads that wait for each other take minutes
    model = load_model(config, seed, "float32")
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(0, int(config["vocab_size"]), (CANDIDATES * count, prompt_tokens), generator=generator)
    greedy = {"do_sample": False, "max_new_tokens": tokens, "output_logits": True, "return_dict_in_generate": True}
    made: Any = model.generate(prompts, attention_mask=torch.ones_like(prompts), **greedy)  # type: ignore[operator]
    logits = torch.stack(made.logits, dim=1).float()
    best = logits.topk(2, dim=-1).values
    clear = (best[..., 0] - best[..., 1]).min(dim=1).values >= LEAD
    if int(clear.sum()) < count:
        raise ValueError(f"only {int(clear.sum())} of {len(clear)} prompts are without near ties; take another seed")
    ids = made.sequences[clear][:count, prompt_tokens:]
    logprobs = logits[clear][:count].log_softmax(-1).gather(2, ids[..., None])[..., 0]
    return Reference(prompts[clear][:count].tolist(), ids.tolist(), logprobs=logprobs.tolist())
