"""Asks a model, once and on a few tokens, whether the learner's short cuts are true of it.

The learner feeds packed rows and applies the vocabulary head itself. Both hold for the common decoder models; a model
that carries state over position resets, or that rescales logits after the head, would be trained on wrong numbers
without any error. So every model is tried before it is trained. Read next: `policy_forward`.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from polyrl.errors import InvalidData
from polyrl_trainer.backends.policy_forward import hidden_states, vocabulary_head

FIRST_LENGTH, SECOND_LENGTH = 5, 4
"""Tokens of the two probe sequences: enough for a convolution of width 4 to leak over the boundary."""

RELATIVE_TOLERANCE = 1e-3
"""Of the largest logit; float32 kernels of different shapes differ by about 1e-6 of it."""


@torch.no_grad()
def probe_model(model: PreTrainedModel) -> None:
    """Raises InvalidData when packed sequences influence each other, or head(hidden) is not the model's logits."""
    vocabulary = model.config.get_text_config().vocab_size
    first = torch.arange(FIRST_LENGTH).remainder(vocabulary).unsqueeze(0)
    second = torch.arange(FIRST_LENGTH, FIRST_LENGTH + SECOND_LENGTH).remainder(vocabulary).unsqueeze(0)
    positions = torch.cat([torch.arange(FIRST_LENGTH), torch.arange(SECOND_LENGTH)]).unsqueeze(0)
    name = model.config.model_type
    try:
        alone = model(input_ids=second, use_cache=False).logits[0]
        hidden = hidden_states(model, torch.cat([first, second], dim=1), positions)
        packed = vocabulary_head(model)(hidden)[0, FIRST_LENGTH:]
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise InvalidData(f"the model ({name}) fails on its first tokens: {' '.join(str(error).split())}") from error
    if (alone - packed).abs().max() > RELATIVE_TOLERANCE * alone.abs().max():
        raise InvalidData(
            f"models of type {name} cannot be trained packed: their logits depend on the neighbours in a row, "
            "or are rescaled after the vocabulary head"
        )
