"""A number for each position instead of a distribution over tokens: the head of a reward model, and of a critic.

The model is transformers' sequence classifier of one label, so that its folder loads with
AutoModelForSequenceClassification: the trunk of a language model, and one row of weights (`score`) where that has its
vocabulary. A trunk that comes from a language model gets a row that is drawn from the seed.

The value of a learned position is what the head says of all that stands before it, as a token's logprob is.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from polyrl.errors import InvalidData
from polyrl_trainer.backends.configs import SpecialTokens
from polyrl_trainer.backends.models.attention import Documents
from polyrl_trainer.backends.models.model_config import reason_of

HEAD = "score"
"""Name that transformers gives the layer, for the causal models that it has classifiers of."""
HEAD_WEIGHT = f"{HEAD}.weight"
USUAL_SPREAD = 0.02
"""Standard deviation of the head's first weights where the config names no `initializer_range`, as in GPT-2."""


def value_head(model: PreTrainedModel) -> nn.Module:
    """The layer from hidden states to one number. Raises InvalidData for an architecture that has none."""
    head = getattr(model, HEAD, None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise InvalidData(f"models of type {model.config.model_type} have no value head that PolyRL knows")
    return head


def draw_head(model: PreTrainedModel, seed: int) -> None:
    """First weights, a function of the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    spread = getattr(model.config.get_text_config(), "initializer_range", USUAL_SPREAD)
    for parameter in value_head(model).parameters():
        nn.init.normal_(parameter, std=spread, generator=generator)


def add_head(model: PreTrainedModel, seed: int) -> None:
    """Puts a value head beside a language model's own, drawn from the seed."""
    model.score = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
    draw_head(model, seed)


def name_padding(model: PreTrainedModel, special_tokens: SpecialTokens) -> None:
    """transformers scores the last token that is no padding; where a tokenizer has none, the end of text stands in."""
    padding = special_tokens.eos if special_tokens.pad is None else special_tokens.pad
    if padding is not None:
        model.config.get_text_config().pad_token_id = padding


def position_values(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """float32[...] from hidden states [..., H]; the head computes in float32, whatever the trunk's dtype: a bfloat16
    score has three digits."""
    with torch.autocast(hidden.device.type, enabled=False):
        # A copy: FSDP hangs its hooks on what a forward pass gives, which a view would lose.
        values: torch.Tensor = value_head(model)(hidden.float()).squeeze(-1).clone()
    return values


CPU = torch.device("cpu")
FIRST, SECOND = (1, 2, 3, 4, 5), (2, 4, 3, 1)
"""Two probe sequences: long enough for a convolution of width 4 to leak over the boundary."""
RELATIVE_TOLERANCE = 1e-3
"""Share of the larger of the value and 1; kernels of different shapes differ by about 1e-6 of it."""


@torch.no_grad()
def probe_value_model(
    model: PreTrainedModel, device: torch.device = CPU, tolerance: float = RELATIVE_TOLERANCE
) -> None:
    """Raises InvalidData when packed sequences influence each other, or the model's own score is another number."""
    vocabulary = model.config.get_text_config().vocab_size
    first, second = (torch.tensor([ids], device=device).remainder(vocabulary) for ids in (FIRST, SECOND))
    positions = torch.cat([torch.arange(len(FIRST)), torch.arange(len(SECOND))]).unsqueeze(0).to(device)
    name = model.config.model_type
    try:
        both, more = torch.cat([first, second], dim=1), Documents.of([len(FIRST), len(SECOND)], device).arguments(model)
        trunk = model.base_model(input_ids=both, position_ids=positions, use_cache=False, **more)
        packed = position_values(model, trunk.last_hidden_state)[0, -1]
        # Padding that comes after does not count, as little as a token that is padding by its number.
        alone = model(input_ids=second, use_cache=False, attention_mask=torch.ones_like(second))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise InvalidData(f"the model ({name}) fails on its first tokens: {reason_of(error)}") from error
    last_is_padding = int(second[0, -1]) == model.config.get_text_config().pad_token_id
    difference = float((alone.logits[0, 0] - packed).abs())
    if not last_is_padding and difference > tolerance * max(1.0, abs(float(packed))):
        raise InvalidData(f"models of type {name} cannot be trained packed: their scores depend on neighbours in a row")
