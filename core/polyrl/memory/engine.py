"""What an engine takes of each of its GPUs: the weights that it serves, keys and values of the tokens in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from polyrl.manifest.engine_args import attention_parallel, pipeline_parallel
from polyrl.manifest.rollout import EngineSpec
from polyrl.memory.learner import CUDA_BYTES
from polyrl.memory.sizes import SERVED_BYTES, ModelSizes

ENGINE_WORK_BYTES: Final = 3 << 29
"""What SGLang takes beside its share, for graphs and activations of small models; a guess."""
USUAL_FRACTION: Final = 0.85
"""What SGLang takes about, of what is free, where it is not limited; it chooses by the GPU, between 0.75 and 0.9."""


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Bytes on one GPU of an engine."""

    weights: int
    per_token: int
    """Keys and values of one token in flight."""
    fraction: float
    """Share of what is free at its start that holds both."""
    work: int = ENGINE_WORK_BYTES
    process: int = CUDA_BYTES

    def share(self, free: int) -> int:
        """What it takes for weights, keys and values where so much is free."""
        return int(self.fraction * max(0, free))

    def tokens(self, free: int) -> int:
        """Tokens of all sequences in flight, where so much is free."""
        return max(0, self.share(free) - self.weights) // self.per_token


def engine_memory(sizes: ModelSizes, engine: EngineSpec, dtype: str) -> EngineMemory:
    """Memory of each GPU of an engine. Where it has more GPUs than heads of keys and values each has a whole one, and
    the weights that make it: several hold the same."""
    tensor, pipeline = engine.tensor_parallel, pipeline_parallel(engine)
    parts = min(attention_parallel(engine), sizes.key_heads)
    of_keys = 2 * sizes.layers * sizes.hidden * sizes.keys
    whole = sizes.parameters + of_keys * tensor // parts - of_keys
    return EngineMemory(
        weights=SERVED_BYTES[dtype] * whole // (tensor * pipeline),
        per_token=max(1, kv_bytes(sizes, dtype) // (parts * pipeline)),
        fraction=USUAL_FRACTION if engine.mem_fraction is None else engine.mem_fraction,
    )


def kv_bytes(sizes: ModelSizes, dtype: str) -> int:
    """Keys and values of one token in an engine."""
    return 2 * sizes.layers * sizes.keys * SERVED_BYTES[dtype]
