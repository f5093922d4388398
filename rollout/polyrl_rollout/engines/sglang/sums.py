"""What an SGLang server adds its weights up to, and what else that depends on.

It hashes each tensor as it lies in the model, fused and cut as the model is, with another hash on a CPU than on a GPU:
nobody else can tell the sum beforehand, so engines are compared with each other (`polyrl.weights.engine_sums`).
"""

from __future__ import annotations

from typing import Any, Final

from polyrl.weights import digest

QUESTION: Final = {"action": "checksum", "selector": "target"}
"""Of the model itself: a draft model has no part in what is loaded."""
MAX_KIND: Final = 128
WIDE: Final = ("float32", "float")
"""SGLang's names of the only dtype that takes whatever a version holds without rounding; of others the numbers have
NARROW bytes."""
NARROW: Final = 2
SIZES: Final = ("tp", "dp", "pp", "ep")


def kind_of(info: dict[str, Any], accelerator: object) -> str:
    """Of a server's /server_info, and the name of its GPU, None on a CPU. Empty where no two servers are alike: experts
    that move by what is generated lie elsewhere in each."""
    if info.get("enable_eplb"):
        return ""
    sizes = [f"{name}{info.get(f'{name}_size')}" for name in SIZES]
    words = ("SGLang", info.get("version"), accelerator or info.get("device"), info.get("dtype"), *sizes)
    return " ".join(map(str, words))[:MAX_KIND]


def sum_of(answer: dict[str, Any]) -> bytes | None:
    """Of all ranks, in whatever order they answered; None for an answer of a release that says it otherwise."""
    try:
        ranks = sorted(str(rank["per_gpu_checksum"]) for rank in answer["ranks"])
    except (KeyError, TypeError):
        return None
    return digest(" ".join(ranks).encode()) if ranks else None
