"""How much of a GPU's memory a job takes: bounds that refuse what surely fails, an estimate for a person to plan by.

    learner   float32 weights, gradients and AdamW's two moments; with a KL penalty the reference's weights; with
              adapters (LoRA) these for the adapters alone, and the frozen weights in `model.dtype`
              a pass: bfloat16 casts of the weights, activations of its tokens, one chunk of logits
    engine    the weights it serves, keys and values of the tokens in flight

The estimate is computed, never measured on a GPU. Its activations are those that a Qwen2-like layer keeps for its
backward pass without recomputation, as counted on a CPU (tests/integration/trainer/test_activation_bytes.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from polyrl.local.devices import Gpu
from polyrl.local.gpu_assignment import GpuAssignment, GpuRefusal
from polyrl.local.memory import (
    FLOAT32_BYTES,
    GIB,
    LEARNER_BYTES,
    SERVED_BYTES,
    learner_bytes,
    parameters_of,
    trains_critic,
)
from polyrl.manifest.engine_args import argument, copies_per_engine
from polyrl.manifest.job import JobSpec
from polyrl.manifest.recipe import RecipeSpec

MEMORY_FRACTION: Final = "--mem-fraction-static"
"""SGLang's argument: the share that it takes, for weights, keys and values, of what is free when it starts."""

CAST_BYTES: Final = 2
"""Of a parameter during a pass in bfloat16."""
LOGITS_BYTES: Final = 1 << 30
"""Four float32 copies of a chunk of logits, which is 256 MiB at most (see the trainer's `EngineConfig`)."""
ENTROPY_BYTES: Final = 1 << 29
"""Two more of them, the probabilities and a gradient, where the entropy has one."""
CUDA_BYTES: Final = 1 << 30
"""Of a process that uses CUDA, whatever it does: its context and its libraries' workspaces; a guess."""
ENGINE_WORK_BYTES: Final = 3 << 29
"""What SGLang takes beside its share, for graphs and activations of small models; a guess."""
SHARED_KV_TOKENS: Final = 32_768
"""Room for keys and values that a shared GPU should leave: 32 samples of 1,024 tokens."""
FRACTION_STEP: Final = 20
"""Fractions are advised in twentieths."""

KEPT_BYTES: Final = {"bfloat16": (30, 8, 4), "float32": (32, 16, 8)}
"""Kept per token and layer for the backward pass: per width of the residual stream, of the MLP, and of the keys."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What memory depends on."""

    parameters: int
    layers: int
    hidden: int
    inner: int
    keys: int
    """Width of a token's keys in a layer; values are as wide."""

    @classmethod
    def of(cls, config: Mapping[str, Any], parameters: int = 0) -> ModelSizes | None:
        """From the fields of a transformers config; None where they do not give the sizes."""
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
        sizes = [size for name in names if isinstance(size := config.get(name), int) and size > 0]
        if len(sizes) < len(names):
            return None
        layers, hidden, inner, heads = sizes
        given = [config.get(name) for name in ("num_key_value_heads", "head_dim")]
        groups, width = (size if isinstance(size, int) and size > 0 else 0 for size in given)
        keys = (groups or heads) * (width or hidden // heads)
        parameters = parameters or parameters_of(config)
        return cls(parameters=parameters, layers=layers, hidden=hidden, inner=inner, keys=keys)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What a GPU holds of a model."""

    alone: int
    """Tokens of a pass where the learner has the GPU for itself; 0: it does not fit."""
    shared: int
    """The same beside the reserved engine."""
    fraction: float
    """Of the reserved engine there."""


def rest_bytes(parameters: int, recipe: RecipeSpec | None = None) -> int:
    """What the learner holds from its first step on, between passes too; adapters not counted."""
    return parameters * (LEARNER_BYTES if recipe is None else learner_bytes(recipe))


def adapter_bytes(sizes: ModelSizes, recipe: RecipeSpec | None) -> int:
    """What the learner holds of adapters on all linear layers of a decoder."""
    if recipe is None or recipe.model.lora is None:
        return 0
    hidden, inner, keys = sizes.hidden, sizes.inner, sizes.keys
    widths = 2 * 2 * hidden + 2 * (hidden + keys) + 3 * (hidden + inner)
    return LEARNER_BYTES * recipe.model.lora.rank * sizes.layers * widths * (2 if trains_critic(recipe) else 1)


def kept_bytes(sizes: ModelSizes, dtype: str) -> int:
    """Activations that the learner keeps for each token of a pass."""
    hidden, inner, keys = KEPT_BYTES[dtype]
    return sizes.layers * (hidden * sizes.hidden + inner * sizes.inner + keys * sizes.keys)


def pass_bytes(sizes: ModelSizes, dtype: str, tokens: int, recipe: RecipeSpec | None = None) -> int:
    """What a pass takes beside what the learner holds anyway; frozen weights are held as a pass needs them."""
    frozen = recipe is not None and recipe.model.lora is not None
    casts = CAST_BYTES * sizes.parameters if dtype == "bfloat16" and not frozen else 0
    entropy = ENTROPY_BYTES if recipe is not None and recipe.algorithm.entropy_coefficient > 0 else 0
    return casts + LOGITS_BYTES + entropy + tokens * kept_bytes(sizes, dtype)


def kv_bytes(sizes: ModelSizes, dtype: str) -> int:
    """Keys and values of one token in an engine."""
    return 2 * sizes.layers * sizes.keys * SERVED_BYTES[dtype]


def fit(sizes: ModelSizes, gpu_bytes: int, dtype: str = "bfloat16", recipe: RecipeSpec | None = None) -> Fit:
    """Estimated; without a recipe, all parameters learn, and there is no reference."""
    fixed = pass_bytes(sizes, dtype, 0, recipe) + adapter_bytes(sizes, recipe) + CUDA_BYTES
    left = gpu_bytes - rest_bytes(sizes.parameters, recipe) - fixed
    free = gpu_bytes - FLOAT32_BYTES * sizes.parameters - 2 * CUDA_BYTES
    serves = SERVED_BYTES[dtype] * sizes.parameters + SHARED_KV_TOKENS * kv_bytes(sizes, dtype)
    fraction = math.ceil(FRACTION_STEP * serves / free) / FRACTION_STEP if free > serves else 1.0
    beside = left - CUDA_BYTES - ENGINE_WORK_BYTES - int(fraction * free)
    per_token = kept_bytes(sizes, dtype)
    return Fit(alone=max(0, left // per_token), shared=max(0, beside // per_token), fraction=fraction)


def gpu_fault(spec: JobSpec, parameters: int, assignment: GpuAssignment) -> GpuRefusal | None:
    """What surely does not fit, and why; None where it may, or where sizes are not known."""
    dtype = spec.recipe.model.dtype
    served = SERVED_BYTES[dtype] * parameters
    copies = copies_per_engine(spec.rollout.engine)
    for gpus in (*assignment.rollouts, () if assignment.shared else assignment.reserved):
        room = _memory(gpus)
        if room is not None and copies * served > room:
            each = f"{copies} times {_gib(served)}" if copies > 1 else _gib(served)
            sentence = f"an engine's weights are {each}, and GPU {_names(gpus)} has {_gib(room)}"
            return GpuRefusal("recipe.model", f"{sentence}; take a smaller model, or more GPUs per engine")
    room = _memory(assignment.trainer)
    if room is None:
        return None
    rest = rest_bytes(parameters, spec.recipe)
    if rest > room:
        sentence = f"the learner's weights, gradients and optimizer state are {_gib(rest)}, and it learns on one GPU"
        return GpuRefusal("recipe.model", f"{sentence}; {_names(assignment.trainer)} has {_gib(room)}")
    return _shared_fault(spec, parameters, rest, room=room) if assignment.shared else None


def gpu_notes(spec: JobSpec, sizes: ModelSizes | None, assignment: GpuAssignment) -> list[str]:
    """What may run out of memory by the estimate, and what to change."""
    room = _memory(assignment.trainer)
    if sizes is None or room is None:
        return []
    tokens = spec.recipe.max_tokens_per_micro_batch
    found = fit(sizes, room, spec.recipe.model.dtype, spec.recipe)
    at_most = found.shared if assignment.shared else found.alone
    notes = []
    if tokens > at_most:
        notes.append(
            f"recipe.maxTokensPerMicroBatch: passes of {tokens:,} tokens may not fit into GPU"
            f" {_names(assignment.trainer)}; about {at_most:,} do (computed, not measured)"
        )
    if assignment.shared and argument(spec.rollout.engine.args, [MEMORY_FRACTION]) is None:
        notes.append(
            f"rollout.engine.args: without {MEMORY_FRACTION} SGLang takes most of the GPU that it shares with the"
            f" learner; {found.fraction:g} would do (computed, not measured)"
        )
    return notes


def estimate_line(spec: JobSpec, sizes: ModelSizes | None) -> str:
    """What a GPU would have to hold, for a person; empty for a model that fits anywhere, or of unknown sizes."""
    if sizes is None:
        return ""
    rest = rest_bytes(sizes.parameters, spec.recipe) + adapter_bytes(sizes, spec.recipe)
    if rest < GIB:
        return ""
    dtype, tokens = spec.recipe.model.dtype, spec.recipe.max_tokens_per_micro_batch
    more, served = pass_bytes(sizes, dtype, tokens, spec.recipe), SERVED_BYTES[dtype] * sizes.parameters
    return (
        f"on a GPU the learner takes about {_gib(rest)} at rest and {_gib(more)} more in a pass of {tokens:,} tokens"
        f" (recipe.maxTokensPerMicroBatch); an engine {_gib(served)} of weights and"
        f" {kv_bytes(sizes, dtype) / 1024:.0f} KiB per token in flight (computed, not measured)"
    )


def _shared_fault(spec: JobSpec, parameters: int, rest: int, *, room: int) -> GpuRefusal | None:
    """The learner's weights are there before the engine starts; its gradients and moments come after."""
    weights, served = FLOAT32_BYTES * parameters, SERVED_BYTES[spec.recipe.model.dtype] * parameters
    free, later = room - weights, rest - weights
    if later + served > free:
        sentence = (
            f"the learner's {_gib(rest)} and {_gib(served)} of the reserved engine's weights are more than their GPU"
        )
        return GpuRefusal(
            "trainer.reservedEngine", f"{sentence} has, {_gib(room)}; with false, rollouts on other GPUs generate alone"
        )
    given = argument(spec.rollout.engine.args, [MEMORY_FRACTION])
    try:
        fraction = None if given is None else float(given)
    except ValueError:
        return None  # SGLang says so itself
    most, least = math.floor(100 * (1 - later / free)) / 100, math.ceil(100 * served / free) / 100
    if fraction is None or least <= fraction <= most:
        return None
    return GpuRefusal(
        "rollout.engine.args",
        f"{MEMORY_FRACTION} {given} of the GPU that the reserved engine shares with the learner; at least"
        f" {least:g} holds its weights, and at most {most:g} leaves room for gradients and optimizer state",
    )


def _memory(gpus: tuple[Gpu, ...]) -> int | None:
    """Of all of them; None where there are none, or that of one is not known."""
    known = [gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None]
    return sum(known) if gpus and len(known) == len(gpus) else None


def _gib(number: int) -> str:
    return f"{number / GIB:.1f} GiB"


def _names(gpus: tuple[Gpu, ...]) -> str:
    return ",".join(gpu.name for gpu in gpus)
