"""The layers of a decoder: what is sharded together, and what may be computed twice instead of being kept."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel


def decoder_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """By the names that transformers keeps of what must stay on one device."""
    names = set(model._no_split_modules or ())
    return [module for module in model.base_model.modules() if type(module).__name__ in names]


def compute_blocks_twice(model: PreTrainedModel) -> None:
    """From here on a block's activations are computed again in the backward pass, of its input alone (Chen et al. 2016,
    arXiv 1604.06174). Names of parameters stay as they are."""
    for block in decoder_blocks(model):
        # Not transformers' own switch, which acts in train mode only.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
