"""What the memory of a model depends on, counted from the fields of its config; nothing is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

GIB: Final = 1 << 30
SERVED_BYTES: Final = {"float32": 4, "bfloat16": 2}
"""Bytes of a parameter, by `model.dtype`."""

MAX_SIZE: Final = 1 << 32
"""Largest width, and most layers: a file may claim any number."""

BIASED: Final = {"qwen2"}
"""Decoders whose projections to queries, keys and values have a bias."""
NORMED_HEADS: Final = {"qwen3"}
"""Decoders that norm the queries and keys of each head."""
COUNTED: Final = {"llama", "mistral", *BIASED, *NORMED_HEADS}
"""Dense decoders with a gated MLP, whose parameters are counted one by one; of others there is a lower bound."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What memory depends on."""

    parameters: int
    layers: int
    hidden: int
    inner: int
    heads: int
    """Heads of attention, over which context parallel spreads a pass."""
    queries: int
    """Width of a token's queries in a layer."""
    keys: int
    """Width of its keys; values are as wide."""
    key_heads: int
    """Heads of keys and values, over which tensor parallel spreads them."""
    vocabulary: int
    outside: int
    """Parameters outside the layers: embeddings, and the vocabulary's head where it is not the same."""
    norms_heads: bool = False
    """Queries and keys of each head are normed."""

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        return max(0, self.parameters - self.outside) // self.layers

    @property
    def head(self) -> int:
        """Parameters of the vocabulary's head; 0 where it is the embeddings."""
        table = self.vocabulary * self.hidden
        return table if table and self.outside >= 2 * table else 0

    @property
    def without_head(self) -> ModelSizes:
        """Sizes of the same model with a value for each token in place of logits, as critics and reward models are."""
        return replace(self, parameters=max(0, self.parameters - self.head), outside=self.outside - self.head)

    @property
    def layer_matrices(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of a layer's linear maps: queries, keys, values, what attention gives, gate, up, down."""
        hidden, inner = self.hidden, self.inner
        attention = ((self.queries, hidden), (self.keys, hidden), (self.keys, hidden), (hidden, self.queries))
        return (*attention, (inner, hidden), (inner, hidden), (hidden, inner))

    @classmethod
    def of(cls, config: Mapping[str, Any], parameters: int = 0) -> ModelSizes | None:
        """From the fields of a transformers config; None where they do not give the sizes. `parameters` are those of
        the model's files, where there are any."""
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
        sizes = [_size(config, name) for name in names]
        if not all(sizes):
            return None
        layers, hidden, inner, heads = sizes
        groups, vocabulary = _size(config, "num_key_value_heads") or heads, _size(config, "vocab_size")
        width = _size(config, "head_dim") or hidden // heads
        return cls(
            parameters=parameters or parameters_of(config),
            layers=layers,
            hidden=hidden,
            inner=inner,
            heads=heads,
            queries=heads * width,
            keys=groups * width,
            key_heads=groups,
            vocabulary=vocabulary,
            outside=vocabulary * hidden * _tables(config),
            norms_heads=config.get("model_type") in NORMED_HEADS,
        )


def parameters_of(config: Mapping[str, Any]) -> int:
    """Parameters of a dense decoder with a gated MLP, exactly; of another at least: embeddings, and per layer two
    square matrices of attention and two of the MLP; 0 where sizes are not given."""
    hidden, layers, inner, vocabulary = (
        _size(config, name) for name in ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
    )
    heads = _size(config, "num_attention_heads")
    if config.get("model_type") not in COUNTED or not heads:
        return hidden * (vocabulary + layers * (2 * hidden + 2 * inner))
    width = _size(config, "head_dim") or hidden // heads
    queries, keys = heads * width, (_size(config, "num_key_value_heads") or heads) * width
    attention = hidden * (2 * queries + 2 * keys)
    attention += queries + 2 * keys if config["model_type"] in BIASED else 0
    attention += 2 * width if config["model_type"] in NORMED_HEADS else 0
    return vocabulary * hidden * _tables(config) + layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden


def _tables(config: Mapping[str, Any]) -> int:
    """Number of matrices of vocabulary x hidden: the embeddings, and the head where it is one of its own."""
    return 1 if config.get("tie_word_embeddings", config.get("model_type") not in COUNTED) else 2


def _size(config: Mapping[str, Any], name: str) -> int:
    size = config.get(name)
    return size if isinstance(size, int) and 0 < size <= MAX_SIZE else 0
