"""What a GPU of this machine holds of a job: bounds that refuse what surely fails, an estimate for a person to plan by.

The sums are `polyrl.memory`'s. The estimate is computed, never measured on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from polyrl.local.devices import Gpu
from polyrl.local.gpu_assignment import GpuAssignment, GpuRefusal
from polyrl.manifest.engine_args import copies_per_engine
from polyrl.manifest.job import JobSpec
from polyrl.manifest.recipe import RecipeSpec
from polyrl.manifest.spec import CpuOffload, FsdpSpec
from polyrl.memory.engine import ENGINE_WORK_BYTES, kv_bytes
from polyrl.memory.learner import (
    CUDA_BYTES,
    ONE_MODEL,
    activation_bytes,
    computes_in_shards,
    learner_bytes,
    learner_memory,
    moments_at_least,
)
from polyrl.memory.moments import FLOAT32_BYTES
from polyrl.memory.sizes import GIB, SERVED_BYTES, ModelSizes

SHARED_KV_TOKENS: Final = 32_768
"""Room for keys and values that a shared GPU should leave: 32 samples of 1,024 tokens."""
FRACTION_STEP: Final = 20
"""Fractions are advised in twentieths."""
LONG_PASS: Final = 1 << 20
"""Tokens whose logits are computed in chunks, whatever the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What a GPU holds of a model."""

    alone: int
    """Tokens of a pass where the learner has the GPU for itself; 0: it does not fit."""
    shared: int
    """The same beside the reserved engine."""
    fraction: float
    """Memory fraction of the reserved engine beside the learner."""


def fit(sizes: ModelSizes, gpu_bytes: int, recipe: RecipeSpec, ranks: int = 1, fsdp: FsdpSpec = ONE_MODEL) -> Fit:
    """Estimated, for each of so many GPUs that learn together."""
    long = learner_memory(sizes, recipe, tokens=LONG_PASS, ranks=ranks, fsdp=fsdp)
    left = gpu_bytes - (long.total - long.activations)
    free = gpu_bytes - long.weights - 2 * CUDA_BYTES
    dtype = recipe.model.dtype
    serves = SERVED_BYTES[dtype] * sizes.parameters + SHARED_KV_TOKENS * kv_bytes(sizes, dtype)
    fraction = math.ceil(FRACTION_STEP * serves / free) / FRACTION_STEP if free > serves else 1.0
    beside = left - CUDA_BYTES - ENGINE_WORK_BYTES - int(fraction * free)
    per_token = activation_bytes(sizes, recipe, sharded=computes_in_shards(ranks, fsdp))
    return Fit(alone=max(0, left // per_token), shared=max(0, beside // per_token), fraction=fraction)


def gpu_fault(spec: JobSpec, parameters: int, assignment: GpuAssignment, head: int = 0) -> GpuRefusal | None:
    """What surely does not fit, and why; None where it may, or where sizes are not known. `head`: of the parameters,
    those of the vocabulary's."""
    dtype = spec.recipe.model.dtype
    served = SERVED_BYTES[dtype] * parameters
    copies = copies_per_engine(spec.rollout.engine)
    for gpus in (*assignment.rollouts, () if assignment.shared else assignment.reserved):
        room = _memory(gpus, sum)
        if room is not None and copies * served > room:
            each = f"{copies} times {_gib(served)}" if copies > 1 else _gib(served)
            sentence = f"an engine's weights are {each}, and GPU {_names(gpus)} has {_gib(room)}"
            return GpuRefusal("recipe.model", f"{sentence}; take a smaller model, or more GPUs per engine")
    room, ranks = _memory(assignment.trainer, min), len(assignment.trainer)
    if room is None:
        return None
    fsdp = spec.trainer.fsdp
    if fsdp.cpu_offload is CpuOffload.ALL:
        return None
    shards = max(1, ranks // fsdp.dp_replicate)
    away = moments_at_least(spec.recipe, parameters, head) if fsdp.cpu_offload is CpuOffload.OPTIMIZER else 0
    rest = (learner_bytes(spec.recipe, parameters, head) - away) // shards
    if rest > room:
        where = "and it learns on one GPU" if ranks == 1 else f"on each of its {ranks} GPUs"
        held = "weights and gradients" if away else "weights, gradients and optimizer state"
        sentence = f"the learner's {held} are {_gib(rest)}, {where}"
        return GpuRefusal("recipe.model", f"{sentence}; {_names(assignment.trainer)} has {_gib(room)}")
    return _shared_fault(spec, parameters // shards, rest, room=room, served=served) if assignment.shared else None


def gpu_notes(spec: JobSpec, sizes: ModelSizes | None, assignment: GpuAssignment) -> list[str]:
    """What may run out of memory by the estimate, and what to change."""
    room = _memory(assignment.trainer, min)
    if sizes is None or room is None:
        return []
    tokens = spec.recipe.max_tokens_per_micro_batch
    found = fit(sizes, room, spec.recipe, len(assignment.trainer), spec.trainer.fsdp)
    at_most = (found.shared if assignment.shared else found.alone) * spec.trainer.context_parallel
    notes = []
    if tokens > at_most:
        notes.append(
            f"recipe.maxTokensPerMicroBatch: passes of {tokens:,} tokens may not fit into GPU"
            f" {_names(assignment.trainer)}; about {at_most:,} do (computed, not measured)"
        )
    if assignment.shared and spec.reserved_engine.mem_fraction is None:
        notes.append(
            f"trainer.reservedMemFraction: without it SGLang takes most of the GPU that it shares with the"
            f" learner; {found.fraction:g} would do (computed, not measured)"
        )
    return notes


def estimate_line(spec: JobSpec, sizes: ModelSizes | None) -> str:
    """What a GPU would have to hold, for a person; empty for a model that fits anywhere, or of unknown sizes."""
    if sizes is None:
        return ""
    dtype, tokens = spec.recipe.model.dtype, spec.recipe.max_tokens_per_micro_batch
    learner = learner_memory(sizes, spec.recipe, tokens=tokens, fsdp=spec.trainer.fsdp)
    if learner.held < GIB:
        return ""
    served = SERVED_BYTES[dtype] * sizes.parameters
    return (
        f"on a GPU the learner takes about {_gib(learner.held)} at rest and {_gib(learner.in_a_pass)} more in a pass of"
        f" {tokens:,} tokens (recipe.maxTokensPerMicroBatch); an engine {_gib(served)} of weights and"
        f" {kv_bytes(sizes, dtype) / 1024:.0f} KiB per token in flight (computed, not measured)"
    )


def _shared_fault(spec: JobSpec, parameters: int, rest: int, *, room: int, served: int) -> GpuRefusal | None:
    """The learner's weights, of its share of the parameters, are there before the engine starts; its gradients and
    moments come after."""
    weights = FLOAT32_BYTES * parameters
    free, later = room - weights, rest - weights
    if later + served > free:
        sentence = (
            f"the learner's {_gib(rest)} and {_gib(served)} of the reserved engine's weights are more than their GPU"
        )
        return GpuRefusal(
            "trainer.reservedEngine", f"{sentence} has, {_gib(room)}; with false, rollouts on other GPUs generate alone"
        )
    fraction = spec.reserved_engine.mem_fraction
    most, least = math.floor(100 * (1 - later / free)) / 100, math.ceil(100 * served / free) / 100
    if fraction is None or least <= fraction <= most:
        return None
    return GpuRefusal(
        "trainer.reservedMemFraction",
        f"{fraction:g} of the GPU that the reserved engine shares with the learner; at least"
        f" {least:g} holds its weights, and at most {most:g} leaves room for gradients and optimizer state",
    )


def _memory(gpus: tuple[Gpu, ...], of: Callable[[list[int]], int]) -> int | None:
    """Bytes `of` them: `sum`, or `min` for the smallest; None where there are none, or that of one is not known."""
    known = [gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None]
    return of(known) if gpus and len(known) == len(gpus) else None


def _gib(number: int) -> str:
    return f"{number / GIB:.1f} GiB"


def _names(gpus: tuple[Gpu, ...]) -> str:
    return ",".join(gpu.name for gpu in gpus)
