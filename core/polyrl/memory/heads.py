"""Over how many GPUs a model's attention can be spread: its heads are given out whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from polyrl.manifest.engine_args import attention_parallel
from polyrl.manifest.job import JobSpec

TENSOR_FIELD: Final = "rollout.engine.tensorParallel"
CONTEXT_FIELD: Final = "trainer.contextParallel"
"""Fields below spec."""


def engine_spreads(heads: int, key_heads: int, gpus: int) -> bool:
    """Whether SGLang takes so many GPUs: each has as many heads as the others; of keys and values several GPUs may hold
    the same head, then each head is held as often as the others."""
    fewer, more = sorted((key_heads, gpus))
    return heads % gpus == 0 and more % fewer == 0


def wrong_spreads(spec: JobSpec, heads: int, key_heads: int) -> Iterator[tuple[str, str]]:
    """Field and sentence of each number that a model with so many heads, `key_heads` of keys, does not allow."""
    slices = spec.trainer.context_parallel
    if heads % slices:
        fitting = [one for one in range(1, heads + 1) if heads % one == 0]
        sentence = f"{slices} does not divide the model's {heads} attention heads; set one of {_named(fitting)}"
        yield CONTEXT_FIELD, sentence
    engine = spec.rollout.engine
    if not engine.type.is_server or attention_parallel(engine) != engine.tensor_parallel:
        return
    gpus = engine.tensor_parallel
    if not engine_spreads(heads, key_heads, gpus):
        fitting = [one for one in range(1, heads + 1) if engine_spreads(heads, key_heads, one)]
        of_keys = "" if key_heads == heads else f" and {key_heads} heads of keys and values"
        sentence = f"the model's {heads} attention heads{of_keys} are not spread evenly over {gpus} GPUs"
        yield TENSOR_FIELD, f"{sentence}; set one of {_named(fitting)}"


def _named(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
