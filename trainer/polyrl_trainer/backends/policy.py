"""A model on its device: packed tokens in, log-probabilities and entropies of the learned positions out.

Always in eval mode: dropout would make the learner's logprobs those of another function than the engines compute.
Memory is bounded: only the positions that predict a learned token reach the vocabulary head, in chunks whose float32
logits fit a stated room. When training needs more than one chunk, each chunk's logits are computed again in the
backward pass instead of being kept (Chen et al. 2016, arXiv 1604.06174).

Shapes: R rows, L width, H hidden size, V vocabulary, P learned positions, C positions of a chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from polyrl.errors import DeadlineExceeded, InvalidData, UserError
from polyrl.manifest.environment import VISIBLE_GPUS
from polyrl_trainer.backend import TrainFuture
from polyrl_trainer.backends.configs import Dtype, EngineConfig, Head, ModelConfig
from polyrl_trainer.backends.models import lora
from polyrl_trainer.backends.models.attention import PACKED_ATTENTION, Documents
from polyrl_trainer.backends.models.blocks import checkpoint_blocks, compile_blocks
from polyrl_trainer.backends.models.model_factory import attention_for, load_model
from polyrl_trainer.backends.models.sequence_slices import SequenceSlices
from polyrl_trainer.backends.models.value_head import CPU, add_head, position_values, probe_value_model
from polyrl_trainer.backends.packing import PackedBatch, PackingPolicy, pack_pass, plan_passes, unpack
from polyrl_trainer.sample import Sample

P = ParamSpec("P")
R = TypeVar("R")


class Background:
    """A queue and its thread."""

    def __init__(self, name: str, threads: int, wait_seconds: float) -> None:
        # The number of compute threads belongs to the calling thread in OpenMP, so it is set in the worker itself.
        self._pool = ThreadPoolExecutor(1, name, initializer=torch.set_num_threads, initargs=(threads,))
        self._name = name
        self._wait_seconds = wait_seconds

    def submit(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Queues `work`; its error is the future's."""
        return self._pool.submit(work, *args, **kwargs)

    def wait_for(self, awaited: str, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Queues `work` and waits for it. Raises DeadlineExceeded naming `awaited`, and whatever `work` raises."""
        future = self.submit(work, *args, **kwargs)
        try:
            return future.result(self._wait_seconds)
        except TimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise DeadlineExceeded(awaited, self._name, self._wait_seconds) from error

    def close(self) -> None:
        """Drops what has not begun; the thread ends after what it is doing."""
        self._pool.shutdown(wait=False, cancel_futures=True)


LOGIT_BYTES = 4
"""Logits become float32 before log_softmax, whatever the dtype of the head: bfloat16 logprobs are off by 1 %."""


def hidden_states(
    model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor, documents: Documents
) -> torch.Tensor:
    """[R, L, H] of the last layer, after the final norm. Sequences are separated by their position ids, which restart,
    or, with packed attention, by where documents begin."""
    more = documents.arguments(model)
    output = model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **more)
    hidden: torch.Tensor = output.last_hidden_state
    return hidden


def vocabulary_head(model: PreTrainedModel) -> nn.Module:
    """The layer from hidden states to logits."""
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head


def effective_temperature(temperature: float) -> float:
    """Greedy sampling (0) reports logprobs at temperature 1, see `SamplingParams`. Raises ValueError below 0."""
    if temperature < 0:
        raise ValueError(f"temperature must be at least 0, not {temperature}")
    return temperature or 1.0


def _score_chunk(
    head: nn.Module, hidden_CH: torch.Tensor, targets: torch.Tensor, scale: float, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_CV = head(hidden_CH).float() * scale
    log_probs_CV = torch.log_softmax(logits_CV, dim=-1)
    log_probs = log_probs_CV.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(log_probs_CV.exp() * log_probs_CV).sum(-1)
    return log_probs, entropy


FIRST_LENGTH, SECOND_LENGTH = 5, 4
"""Tokens of the two probe sequences: enough for a convolution of width 4 to leak over the boundary."""
RELATIVE_TOLERANCE = 1e-3
"""Tolerance as a share of the largest logit; float32 kernels of different shapes differ by about 1e-6 of it."""


@torch.no_grad()
def probe_model(model: PreTrainedModel, device: torch.device = CPU, tolerance: float = RELATIVE_TOLERANCE) -> None:
    """Raises InvalidData when packed sequences influence each other, or head(hidden) is not the model's logits."""
    vocabulary = model.config.get_text_config().vocab_size
    first = torch.arange(FIRST_LENGTH).remainder(vocabulary).unsqueeze(0)
    second = torch.arange(FIRST_LENGTH, FIRST_LENGTH + SECOND_LENGTH).remainder(vocabulary).unsqueeze(0)
    positions = torch.cat([torch.arange(FIRST_LENGTH), torch.arange(SECOND_LENGTH)]).unsqueeze(0)
    first, second, positions = (one.to(device) for one in (first, second, positions))
    documents = Documents.of([FIRST_LENGTH, SECOND_LENGTH], device)
    name = model.config.model_type
    try:
        alone = model(input_ids=second, use_cache=False).logits[0]
        hidden = hidden_states(model, torch.cat([first, second], dim=1), positions, documents)
        packed = vocabulary_head(model)(hidden)[0, FIRST_LENGTH:]
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise InvalidData(f"the model ({name}) fails on its first tokens: {' '.join(str(error).split())}") from error
    if (alone - packed).abs().max() > tolerance * alone.abs().max():
        raise InvalidData(
            f"models of type {name} cannot be trained packed: their logits depend on the neighbours in a row, "
            "or are rescaled after the vocabulary head"
        )


@torch.no_grad()
def sliced_and_whole(
    model: PreTrainedModel, device: torch.device, slices: SequenceSlices
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of this rank's slice of two sequences, as all ranks compute it together, and as it does alone."""
    lengths = [FIRST_LENGTH, SECOND_LENGTH]
    lengths.append(-sum(lengths) % slices.number or slices.number)
    number = torch.arange(sum(lengths), device=device).unsqueeze(0)
    ids = number.remainder(model.config.get_text_config().vocab_size)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths]).unsqueeze(0)
    documents = Documents.of(lengths, device)
    own = number.chunk(slices.number, dim=1)[slices.own][0]
    together = hidden_states(model, ids[:, own], positions[:, own], replace(documents, slices=slices))
    return together, hidden_states(model, ids, positions, documents)[:, own]


def require_like(model: PreTrainedModel, sliced: torch.Tensor, whole: torch.Tensor, *, tolerance: float) -> None:
    """Raises InvalidData for hidden states that a slice does not get as the whole row does."""
    if (sliced - whole).abs().max() > tolerance * whole.abs().max():
        raise InvalidData(
            f"models of type {model.config.model_type} cannot be trained in slices of a row: they mix neighbouring"
            " tokens outside of attention; set spec.trainer.contextParallel to 1"
        )


class PassOutputs(NamedTuple):
    """What a model says of the learned tokens of a pass, float32[P] each."""

    log_probs: torch.Tensor
    """0 of a model that has a value head alone; so are its entropies."""
    entropy: torch.Tensor
    values: torch.Tensor | None
    """None of a language model."""


class Within(Protocol):
    """Runs a part of the forward pass where the model's weights are whole."""

    def __call__(self, work: Callable[[], R]) -> R: ...


def at_once(work: Callable[[], R]) -> R:
    """`Within` for a model that is whole in this process."""
    return work()


@dataclass(frozen=True)
class Policy:
    """float32 weights; the forward pass runs in `dtype`."""

    model: PreTrainedModel
    device: torch.device
    dtype: Dtype
    packing: PackingPolicy
    max_logits_bytes: int
    head: Head = "tokens"
    within: Within = at_once

    def passes(self, samples: Sequence[Sample], together: int = 1) -> Iterator[PackedBatch]:
        """Every sample in exactly one pass, so many consecutive ones in the same. Raises ValueError for no samples, no
        tokens, or a learned first token."""
        if not samples:
            raise ValueError("a batch needs at least one sample")
        for one in plan_passes([sample.length for sample in samples], self.packing, together):
            yield pack_pass(samples, one, self.device)

    def outputs(self, batch: PackedBatch, temperature: float, *, entropy_gradient: bool = False) -> PassOutputs:
        """By the model's head: of logits / temperature, and entropies detached unless `entropy_gradient`."""
        with self.autocast():
            return self.within(lambda: self._outputs(batch, temperature, entropy_gradient))

    def position_values(self, batch: PackedBatch) -> torch.Tensor:
        """float32[P], what the value head says of all before each learned token. Raises InvalidData without one."""
        with self.autocast():
            return self.within(lambda: position_values(self.model, self._predicting(batch)))

    def log_probs(self, samples: Sequence[Sample], temperature: float) -> list[npt.NDArray[np.float32]]:
        """float32[T] per sample, in the order given; 0 where loss_mask is 0."""
        return self._of_samples(samples, lambda batch: self.outputs(batch, temperature).log_probs)

    def values(self, samples: Sequence[Sample]) -> list[npt.NDArray[np.float32]]:
        """float32[T] per sample, in the order given, by the value head."""
        return self._of_samples(samples, self.position_values)

    def _outputs(self, batch: PackedBatch, temperature: float, entropy_gradient: bool) -> PassOutputs:
        hidden_PH = self._predicting(batch)
        values = None if self.head == "tokens" else position_values(self.model, hidden_PH)
        if self.head == "value":
            assert values is not None
            nothing = torch.zeros_like(values, requires_grad=False)
            return PassOutputs(nothing, nothing, values=values)
        log_probs, entropy = self._score(hidden_PH, batch, temperature, entropy_gradient)
        return PassOutputs(log_probs, entropy, values=values)

    def _score(
        self, hidden_PH: torch.Tensor, batch: PackedBatch, temperature: float, entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = vocabulary_head(self.model)
        scale = 1.0 / effective_temperature(temperature)
        chunk = max(1, self.max_logits_bytes // (LOGIT_BYTES * self.model.config.get_text_config().vocab_size))
        parts = []
        for hidden_CH, targets in zip(torch.split(hidden_PH, chunk), torch.split(batch.targets, chunk), strict=True):
            given = head, hidden_CH, targets, scale, entropy_gradient
            if torch.is_grad_enabled() and len(hidden_PH) > chunk:
                parts.append(checkpoint(_score_chunk, *given, use_reentrant=False))
            else:
                parts.append(_score_chunk(*given))
        return torch.cat([log_probs for log_probs, _ in parts]), torch.cat([entropy for _, entropy in parts])

    @torch.no_grad()
    def _of_samples(
        self, samples: Sequence[Sample], of_pass: Callable[[PackedBatch], torch.Tensor]
    ) -> list[npt.NDArray[np.float32]]:
        by_sample: dict[int, npt.NDArray[np.float32]] = {}
        for batch in self.passes(samples):
            by_sample.update(zip(batch.indices, unpack(batch.samples, of_pass(batch)), strict=True))
        return [by_sample[index] for index in range(len(samples))]

    def autocast(self) -> torch.autocast:
        """To the dtype of the forward pass."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == "bfloat16")

    def _predicting(self, batch: PackedBatch) -> torch.Tensor:
        """[P, H], before each learned token."""
        hidden = hidden_states(self.model, batch.input_ids, batch.position_ids, batch.documents)
        return hidden.flatten(0, 1)[batch.predicting]


def create_policy(model: ModelConfig, engine: EngineConfig) -> Policy:
    """Loads, probes and places the model. Raises InvalidManifest or InvalidData for a source that cannot be trained,
    UserError for a device that is not there."""
    device = torch.device(device_name(engine.device))
    loaded = load_model(model.source, model.seed, model.dtype, model.special_tokens, model.vocabulary, model.head)
    if model.head == "value":
        probe_value_model(loaded)
    else:
        probe_model(loaded)
    if model.head == "both":
        add_head(loaded, model.seed)
    if model.adapter is not None:
        lora.add_adapter(loaded, model.adapter, model.seed)
        lora.hold_frozen_in(loaded, model.dtype)
    checkpoint_blocks(loaded, engine.activation_checkpointing)
    compile_blocks(loaded, engine.compile_by, device)
    loaded.set_attn_implementation(attention_for(device, model.dtype))
    loaded.to(device)  # type: ignore[arg-type]
    return Policy(
        model=loaded,
        device=device,
        dtype=model.dtype,
        packing=packing_for(loaded, engine.max_tokens_per_micro_batch),
        max_logits_bytes=engine.max_logits_bytes,
        head=model.head,
    )


def packing_for(model: PreTrainedModel, max_tokens: int, slices: int = 1) -> PackingPolicy:
    """By the attention that the model was given."""
    if model.config._attn_implementation == PACKED_ATTENTION:
        return PackingPolicy.variable_length(max_tokens, slices)
    return PackingPolicy.dense(max_tokens)


def device_name(wanted: str) -> str:
    """Name of the device that `EngineConfig.device` means. Raises UserError for a GPU where there is none."""
    found = torch.cuda.is_available()
    if wanted.startswith("cuda") and not found:
        raise UserError(
            f"the learner was given a GPU, and torch {torch.__version__} finds none that it can use (is the driver"
            f" older than CUDA {torch.version.cuda}?); to learn on the CPU, run with {VISIBLE_GPUS} set and empty"
        )
    if wanted != "auto":
        return wanted
    return "cuda:0" if found else "cpu"


class ReferenceScores(Protocol):
    """Whoever has the logprobs of the reference."""

    def log_probs(
        self, batch: Sequence[Sample], temperature: float = 1.0
    ) -> TrainFuture[list[npt.NDArray[np.float32]]]:
        """float32[T] per sample; 0 where loss_mask is 0. Same meaning as `TrainingBackend.log_probs`."""

    def close(self) -> None:
        """It is not asked again."""


class ModelBelowAdapters:
    """The reference of a model that learns by adapters: itself, without them. On the learner's own thread, so that no
    pass of the learner sees them off."""

    def __init__(self, policy: Policy, background: Background) -> None:
        self._policy = policy
        self._background = background

    def log_probs(
        self, batch: Sequence[Sample], temperature: float = 1.0
    ) -> TrainFuture[list[npt.NDArray[np.float32]]]:
        return self._background.submit(self._log_probs, batch, temperature)

    def close(self) -> None:
        """The thread is the learner's."""

    def _log_probs(self, batch: Sequence[Sample], temperature: float) -> list[npt.NDArray[np.float32]]:
        with lora.adapters_off(self._policy.model):
            return self._policy.log_probs(batch, temperature)


class ReferencePolicy:
    """The frozen policy that a KL penalty compares with: scores, never learns.

    It is made from the source that the stage started from, not copied from a running learner, so a resumed run compares
    with the same reference as an undisturbed one.
    """

    def __init__(self, model: ModelConfig, engine: EngineConfig) -> None:
        """Raises InvalidManifest or InvalidData for a source that cannot be scored."""
        self._policy = create_policy(model, engine)
        self._policy.model.requires_grad_(False)
        self._background = Background("reference policy", engine.threads, engine.wait_seconds)

    def log_probs(
        self, batch: Sequence[Sample], temperature: float = 1.0
    ) -> TrainFuture[list[npt.NDArray[np.float32]]]:
        return self._background.submit(self._policy.log_probs, batch, temperature)

    def close(self) -> None:
        """Ends the background thread."""
        self._background.close()


async def with_reference(samples: list[Sample], reference: ReferenceScores | None, temperature: float) -> list[Sample]:
    """The same samples with their `reference_log_probs`, if there is a reference."""
    if reference is None:
        return samples
    scores = await asyncio.wrap_future(reference.log_probs(samples, temperature))
    return [replace(sample, reference_log_probs=score) for sample, score in zip(samples, scores, strict=True)]
