"""What the learner takes of each of its GPUs: what it holds between passes, and what a pass adds.

    held      float32 weights, gradients and AdamW's two moments; a critic on a trunk of its own the same once more;
              with a KL penalty, and for pairs (DPO), the reference's weights. With adapters (LoRA) these for the
              adapters alone, and the frozen weights: layers in `model.dtype`, embeddings in float32. Over several GPUs
              each holds its share of a copy; with `trainer.fsdp.cpuOffload` the host does, or has the moments alone.
    a pass    on one GPU casts of all weights (autocast keeps them until the pass is over); over several (FSDP2) two
              gathered layers and what is outside the layers, in `model.dtype`, and a layer's gradients on their way
              activations of the pass's tokens, one chunk of logits

The bytes of activations are those that a decoder with a gated MLP keeps for its backward pass, as counted on a CPU
(tests/integration/trainer/test_activation_bytes.py); the sums are held against torch's own accounting
(tests/integration/trainer/test_memory_accounting.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from polyrl.manifest.parts.optimizer import OptimizerName
from polyrl.manifest.recipe import ActivationCheckpointing, Mode, RecipeSpec
from polyrl.manifest.spec import CpuOffload, FsdpSpec
from polyrl.memory.moments import FLOAT32_BYTES, LEAST_MOMENT_BYTES, in_blocks, moment_bytes
from polyrl.memory.sizes import SERVED_BYTES, ModelSizes

LOGITS_CHUNK_BYTES: Final = 256 << 20
"""Bytes of float32 logits at a time (see the trainer's `EngineConfig`)."""
LOGITS_COPIES: Final = 4
"""Copies of a chunk in its backward pass: logits, their log-softmax, the gradients of both."""
ENTROPY_COPIES: Final = 2
"""More where the entropy has a gradient: the probabilities and theirs."""
CUDA_BYTES: Final = 1 << 30
"""Bytes of a process that uses CUDA, whatever it does: its context and its libraries' workspaces; a guess."""

KEPT_BYTES: Final = {"bfloat16": (27, 8, 4, 4), "float32": (25, 16, 8, 8)}
"""Kept per token and layer for the backward pass: per width of the residual stream, of the MLP, of the keys, and of
the queries."""
SHARDED_KEPT_BYTES: Final = {"bfloat16": (17, 8, 4, 4), "float32": (25, 16, 8, 8)}
"""The same over several GPUs, where the residual stream is in `model.dtype` too."""
NORMED_BYTES: Final = {"bfloat16": 6, "float32": 8}
"""More of keys and queries where those of each head are normed, which is done in float32."""
SELECTED: Final = (1, 1, 1, 2)
"""Values kept beside a layer's input by `selective`, in the same widths: the MLP's result, its gate, the values, and
the queries and what attention gives."""
ONE_MODEL: Final = FsdpSpec()
REFERENCE: Final = "reference"
OFFLOADED: Final = {
    CpuOffload.NONE: (),
    CpuOffload.OPTIMIZER: ("optimizer",),
    CpuOffload.ALL: ("weights", "gradients", "optimizer", REFERENCE),
}
"""What the host holds."""
GATHERED_LAYERS: Final = 2
"""The one that computes, and the next, which is fetched meanwhile."""


@dataclass(frozen=True, kw_only=True)
class LearnerMemory:
    """Bytes on one GPU of the learner."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    gathered: int
    """Weights as a pass computes with them, and gradients that are not added to the others yet."""
    activations: int
    logits: int
    host: int = 0
    """Bytes of the host's memory, where it holds what else is on the GPU (`trainer.fsdp.cpuOffload`)."""
    process: int = CUDA_BYTES

    @property
    def held(self) -> int:
        """Bytes held from the first step on, between passes too."""
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def in_a_pass(self) -> int:
        """What a pass adds."""
        return self.gathered + self.activations + self.logits

    @property
    def total(self) -> int:
        """Bytes at a time, at most."""
        return self.held + self.in_a_pass + self.process


def learner_memory(
    sizes: ModelSizes, recipe: RecipeSpec, *, tokens: int, ranks: int = 1, fsdp: FsdpSpec = ONE_MODEL
) -> LearnerMemory:
    """Memory of each of `ranks` GPUs that learn together, in passes of so many tokens each."""
    sharded, shards = computes_in_shards(ranks, fsdp), max(1, ranks // fsdp.dp_replicate)
    sizes = sizes.without_head if recipe.mode is Mode.REWARD_MODEL else sizes
    models = [sizes, sizes.without_head] if trains_critic(recipe) else [sizes]
    lora = recipe.model.lora is not None
    learned = [adapter_parameters(one, recipe) if lora else one.parameters for one in models]
    fitting = [_fitting_blocks(one, recipe) for one in models]
    frozen = sum(_frozen_bytes(one, recipe) for one in models) if lora else 0
    moments = map(moment_bytes, _optimizers(recipe), learned, fitting)
    logits = _logits(sizes, recipe, tokens)
    reference = FLOAT32_BYTES * sizes.parameters if holds_reference(recipe) else 0
    held = {
        "weights": _share(FLOAT32_BYTES * sum(learned) + frozen, shards),
        "gradients": _share(FLOAT32_BYTES * sum(learned), shards),
        "optimizer": _share(sum(moments), shards),
        REFERENCE: _share(reference, shards),
    }
    away = {name: size for name, size in held.items() if name in OFFLOADED[fsdp.cpu_offload]}
    return LearnerMemory(
        **{**held, **dict.fromkeys(away, 0)},
        host=sum(away.values()),
        gathered=_gathered(sizes, recipe, sharded, logits),
        activations=tokens * activation_bytes(sizes, recipe, sharded=sharded),
        logits=logits,
    )


def computes_in_shards(ranks: int, fsdp: FsdpSpec) -> bool:
    """Whether a pass gathers weights layer by layer: of one process too, where the host holds them."""
    return ranks > 1 or fsdp.cpu_offload is CpuOffload.ALL


def learner_bytes(recipe: RecipeSpec, parameters: int = 1, head: int = 0) -> int:
    """What the learner holds of so many parameters between passes, on all GPUs together, at least; adapters, which are
    few, are not counted. `head`: those of the vocabulary's, which not every model has (`ModelSizes.head`)."""
    learned = parameters_at_least(recipe, parameters, head)
    if recipe.model.lora is not None:
        return SERVED_BYTES[recipe.model.dtype] * sum(learned)
    reference = FLOAT32_BYTES * parameters if holds_reference(recipe) else 0
    return 2 * FLOAT32_BYTES * sum(learned) + moments_at_least(recipe, parameters, head) + reference


def parameters_at_least(recipe: RecipeSpec, parameters: int, head: int = 0) -> list[int]:
    """Parameters of each model that learns, the critic last: those that give values have no vocabulary head."""
    headless = max(0, parameters - head)
    first = headless if recipe.mode is Mode.REWARD_MODEL else parameters
    return [first, headless] if trains_critic(recipe) else [first]


def holds_reference(recipe: RecipeSpec) -> bool:
    """Whether the learner holds the model that it began with beside what it learns; below adapters it is there."""
    if recipe.model.lora is not None or recipe.mode in (Mode.SFT, Mode.REWARD_MODEL):
        return False
    return recipe.mode is Mode.DPO or recipe.algorithm.kl_coefficient > 0


def moments_at_least(recipe: RecipeSpec, parameters: int = 1, head: int = 0) -> int:
    """The part of `learner_bytes` that `trainer.fsdp.cpuOffload: optimizer` has in the host's memory."""
    if recipe.model.lora is not None:
        return 0
    learned = zip(_optimizers(recipe), parameters_at_least(recipe, parameters, head), strict=True)
    return sum(LEAST_MOMENT_BYTES[one] * count for one, count in learned)


def _optimizers(recipe: RecipeSpec) -> list[OptimizerName]:
    """Optimizer of each model that learns; of its stages' the one that holds more."""
    stages = {
        Mode.SFT: [recipe.sft.optimizer],
        Mode.SFT_RL: [recipe.sft.optimizer, recipe.algorithm.optimizer],
        Mode.DPO: [recipe.dpo.optimizer],
        Mode.REWARD_MODEL: [recipe.reward_model.optimizer],
    }.get(recipe.mode, [recipe.algorithm.optimizer])
    critics = [recipe.algorithm.critic.optimizer.name] if trains_critic(recipe) else []
    return [max((one.name for one in stages), key=LEAST_MOMENT_BYTES.__getitem__), *critics]


def trains_critic(recipe: RecipeSpec) -> bool:
    """Whether the learner holds the model twice, to learn a value function."""
    algorithm = recipe.algorithm
    return recipe.mode.is_online and algorithm.uses_critic and not algorithm.shares_trunk


def adapter_parameters(sizes: ModelSizes, recipe: RecipeSpec) -> int:
    """Parameters of adapters on all linear layers of a decoder; 0 where the whole model learns."""
    if recipe.model.lora is None:
        return 0
    return recipe.model.lora.rank * sizes.layers * sum(rows + columns for rows, columns in sizes.layer_matrices)


def _fitting_blocks(sizes: ModelSizes, recipe: RecipeSpec) -> int:
    """Number of the parameters of one model that learn and whose moments `adamw_8bit` holds in 8 bits."""
    if (lora := recipe.model.lora) is None:
        shapes = list(sizes.layer_matrices)
        outside = sizes.outside if in_blocks((sizes.vocabulary, sizes.hidden)) else 0
    else:
        shapes = [one for rows, columns in sizes.layer_matrices for one in ((lora.rank, columns), (rows, lora.rank))]
        outside = 0
    return sizes.layers * sum(rows * columns for rows, columns in shapes if in_blocks((rows, columns))) + outside


def _frozen_bytes(sizes: ModelSizes, recipe: RecipeSpec) -> int:
    """Bytes of the weights below adapters: a tied head is the embedding's, which stays in float32."""
    served, embedding = SERVED_BYTES[recipe.model.dtype], sizes.vocabulary * sizes.hidden
    return served * sizes.parameters + (FLOAT32_BYTES - served) * embedding


def activation_bytes(sizes: ModelSizes, recipe: RecipeSpec, *, sharded: bool = False) -> int:
    """For each token of a pass; with `activationCheckpointing` the inputs of all layers and what is kept beside them,
    and all of the one layer that is computed again."""
    kept = kept_bytes(sizes, recipe.model.dtype, sharded=sharded)
    if recipe.activation_checkpointing is ActivationCheckpointing.NONE:
        return kept
    served = SERVED_BYTES[recipe.model.dtype]
    # Autocast leaves the residual stream in float32, shards have it in `model.dtype`.
    of_layer = (served if sharded else FLOAT32_BYTES) * sizes.hidden
    if recipe.activation_checkpointing is ActivationCheckpointing.SELECTIVE:
        of_layer += served * _in_widths(SELECTED, sizes)
    return sizes.layers * of_layer + kept // sizes.layers


def kept_bytes(sizes: ModelSizes, dtype: str, *, sharded: bool = False) -> int:
    """Activations that the learner keeps for each token of a pass."""
    normed = NORMED_BYTES[dtype] * (sizes.keys + sizes.queries) if sizes.norms_heads else 0
    return sizes.layers * (_in_widths((SHARDED_KEPT_BYTES if sharded else KEPT_BYTES)[dtype], sizes) + normed)


def _in_widths(numbers: tuple[int, int, int, int], sizes: ModelSizes) -> int:
    hidden, inner, keys, queries = numbers
    return hidden * sizes.hidden + inner * sizes.inner + keys * sizes.keys + queries * sizes.queries


def _gathered(sizes: ModelSizes, recipe: RecipeSpec, sharded: bool, logits: int) -> int:
    served = SERVED_BYTES[recipe.model.dtype]
    if not sharded:
        # Frozen weights are held as a pass needs them.
        casts = recipe.model.dtype == "bfloat16" and recipe.model.lora is None
        return served * sizes.parameters if casts else 0
    weights = served * (sizes.outside + GATHERED_LAYERS * sizes.layer)
    # Of what is outside the layers and of one layer the gradients as they were computed, and of the layer in float32
    # while they are added over all GPUs: they come when the logits are gone.
    gradients = served * (sizes.outside + sizes.layer) + FLOAT32_BYTES * sizes.layer
    lora = recipe.model.lora is not None
    return weights + (0 if lora else max(0, gradients - logits))


def _logits(sizes: ModelSizes, recipe: RecipeSpec, tokens: int) -> int:
    if recipe.mode is Mode.REWARD_MODEL:
        return 0
    entropy = recipe.algorithm.entropy_coefficient > 0
    chunk = (
        min(LOGITS_CHUNK_BYTES, FLOAT32_BYTES * tokens * sizes.vocabulary) if sizes.vocabulary else LOGITS_CHUNK_BYTES
    )
    return chunk * (LOGITS_COPIES + (ENTROPY_COPIES if entropy else 0))


def _share(number: int, ranks: int) -> int:
    """Share of the largest rank."""
    return -(-number // ranks)
