"""The configs of usual models, as far as memory depends on them, for models that are not on this machine.

Sizes are those of each model's config.json; the parameters that they give are the published ones
(tests/unit/core/memory/test_sizes.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

FIELDS: Final = (
    *("model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings"),
)
KNOWN_MODELS: Final[dict[str, tuple[str | int | bool, ...]]] = {
    "Qwen/Qwen2.5-0.5B": ("qwen2", 896, 24, 4864, 14, 2, 64, 151936, True),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 1536, 28, 8960, 12, 2, 128, 151936, True),
    "Qwen/Qwen2.5-3B": ("qwen2", 2048, 36, 11008, 16, 2, 128, 151936, True),
    "Qwen/Qwen2.5-7B": ("qwen2", 3584, 28, 18944, 28, 4, 128, 152064, False),
    "Qwen/Qwen2.5-14B": ("qwen2", 5120, 48, 13824, 40, 8, 128, 152064, False),
    "Qwen/Qwen2.5-32B": ("qwen2", 5120, 64, 27648, 40, 8, 128, 152064, False),
    "Qwen/Qwen2.5-72B": ("qwen2", 8192, 80, 29568, 64, 8, 128, 152064, False),
    "Qwen/Qwen3-0.6B": ("qwen3", 1024, 28, 3072, 16, 8, 128, 151936, True),
    "Qwen/Qwen3-1.7B": ("qwen3", 2048, 28, 6144, 16, 8, 128, 151936, True),
    "Qwen/Qwen3-4B": ("qwen3", 2560, 36, 9728, 32, 8, 128, 151936, True),
    "Qwen/Qwen3-8B": ("qwen3", 4096, 36, 12288, 32, 8, 128, 151936, False),
    "Qwen/Qwen3-14B": ("qwen3", 5120, 40, 17408, 40, 8, 128, 151936, False),
    "Qwen/Qwen3-32B": ("qwen3", 5120, 64, 25600, 64, 8, 128, 151936, False),
    "meta-llama/Llama-3.2-1B": ("llama", 2048, 16, 8192, 32, 8, 64, 128256, True),
    "meta-llama/Llama-3.2-3B": ("llama", 3072, 28, 8192, 24, 8, 128, 128256, True),
    "meta-llama/Llama-3.1-8B": ("llama", 4096, 32, 14336, 32, 8, 128, 128256, False),
    "meta-llama/Llama-3.1-70B": ("llama", 8192, 80, 28672, 64, 8, 128, 128256, False),
    "mistralai/Mistral-7B-v0.3": ("mistral", 4096, 32, 14336, 32, 8, 128, 32768, False),
}
"""By the id of the base model."""

_VARIANT: Final = re.compile(r"-(instruct|base|math|coder)(?=-|$)", re.IGNORECASE)
"""What a variant's name has more than its base model's: both have the same shape."""


def known_config(hub_id: str) -> Mapping[str, Any]:
    """Config fields of a usual model or a variant of one; empty for any other."""
    wanted = _VARIANT.sub("", hub_id).lower()
    for name, values in KNOWN_MODELS.items():
        if name.lower() == wanted:
            return dict(zip(FIELDS, values, strict=True))
    return {}
