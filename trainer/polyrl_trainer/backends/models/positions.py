"""How long a sequence may be for a model whose positions are rows of a table: there are no more than it has. Others
compute theirs, and go on beyond what their config names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

TABLES: Final = frozenset({"biogpt", "ctrl", "gpt2", "gpt_bigcode", "opt"})
"""Types of models that have one, of those that can be learned."""


def context_fault(config: Mapping[str, Any], context: int) -> str:
    """Why `rollout.engine.maxContext` may not be `context` with the model of this config; empty: it may."""
    kind, positions = config.get("model_type"), config.get("n_positions", config.get("max_position_embeddings"))
    if kind not in TABLES or not isinstance(positions, int) or context <= positions:
        return ""
    return f"{context} is more than the {positions} positions that the model has, a {kind}: take {positions} at most"
