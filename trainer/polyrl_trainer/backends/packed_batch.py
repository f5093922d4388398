"""Turns the samples of one planned pass into tensors, and values per learned position back into arrays per sample.

Position ids restart at 0 with each sequence (and with the padding, which is a sequence that nobody reads): transformers
builds the block-diagonal causal mask from them, so no sequence sees another one.

Shapes: R rows, L width, P learned positions. Refuses to hold: the plan (see `sequence_packing`), the model
(see `policy_forward`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from polyrl_trainer.backend import LossInputs
from polyrl_trainer.backends.sequence_packing import Pass
from polyrl_trainer.sample import Sample

OptionalField = Literal["rollout_log_probs", "advantages", "reference_log_probs"]
OPTIONAL_FIELDS: tuple[OptionalField, ...] = ("rollout_log_probs", "advantages", "reference_log_probs")

PADDING_ID = 0
"""Any id inside the vocabulary would do: nothing learned attends to padding."""


@dataclass(frozen=True)
class PackedBatch:
    """One pass on the device."""

    samples: tuple[Sample, ...]
    """In packing order: `sequence` counts along it."""
    indices: tuple[int, ...]
    """Where each of them stood in the batch that was planned."""
    input_ids: torch.Tensor
    """int64[R, L]"""
    position_ids: torch.Tensor
    """int64[R, L]"""
    predicting: torch.Tensor
    """int64[P], flat index of the position whose output predicts a learned token: the one just before it."""
    targets: torch.Tensor
    """int64[P], the learned tokens."""
    sequence: torch.Tensor
    """int64[P]"""


def pack(samples: Sequence[Sample], one: Pass, device: torch.device) -> PackedBatch:
    """Lays the samples of a pass out as its rows say. Raises ValueError when a sample's first token is to be learned:
    nothing predicts it."""
    indices = tuple(index for row in one.rows for index in row)
    input_ids = np.full((len(one.rows), one.width), PADDING_ID, dtype=np.int64)
    position_ids = np.empty_like(input_ids)
    predicting: list[npt.NDArray[np.int64]] = []
    for number, row in enumerate(one.rows):
        start = 0
        for sample in (samples[index] for index in row):
            end = start + sample.length
            input_ids[number, start:end] = sample.tokens
            position_ids[number, start:end] = np.arange(sample.length)
            predicting.append(_learned(sample) + number * one.width + start - 1)
            start = end
        position_ids[number, start:] = np.arange(one.width - start)
    counts = [len(indices) for indices in predicting]
    flat = np.concatenate(predicting)
    return PackedBatch(
        samples=tuple(samples[index] for index in indices),
        indices=indices,
        input_ids=torch.from_numpy(input_ids).to(device),
        position_ids=torch.from_numpy(position_ids).to(device),
        predicting=torch.from_numpy(flat).to(device),
        targets=torch.from_numpy(input_ids.reshape(-1)[flat + 1]).to(device),
        sequence=torch.from_numpy(np.repeat(np.arange(len(indices)), counts)).to(device),
    )


def loss_inputs(batch: PackedBatch, log_probs: torch.Tensor, entropy: torch.Tensor) -> LossInputs:
    """What a loss sees of a pass; `log_probs` and `entropy` are float32[P]."""
    device = log_probs.device
    absent = frozenset(name for name in OPTIONAL_FIELDS if any(getattr(one, name) is None for one in batch.samples))
    columns = {name: _column(batch.samples, name).to(device) for name in OPTIONAL_FIELDS}
    mask = torch.from_numpy(np.concatenate([one.loss_mask[_learned(one)] for one in batch.samples]))
    return LossInputs(
        log_probs=log_probs,
        entropy=entropy,
        mask=mask.to(device=device, dtype=torch.float32),
        sequence=batch.sequence,
        num_sequences=len(batch.samples),
        absent=absent,
        **columns,
    )


def unpack(batch: PackedBatch, values: torch.Tensor) -> list[npt.NDArray[np.float32]]:
    """float32[T] per sample of the pass, in packing order, from float32[P]; 0 on positions that are not learned."""
    arrays = [np.zeros(sample.length, dtype=np.float32) for sample in batch.samples]
    flat = values.detach().to("cpu", torch.float32).numpy()
    start = 0
    for sample, array in zip(batch.samples, arrays, strict=True):
        learned = _learned(sample)
        array[learned] = flat[start : start + len(learned)]
        start += len(learned)
    return arrays


def _learned(sample: Sample) -> npt.NDArray[np.int64]:
    learned: npt.NDArray[np.int64] = np.flatnonzero(sample.loss_mask)
    if len(learned) and learned[0] == 0:
        raise ValueError(f"sample {sample.id or '(unnamed)'}: its first token has no predecessor to learn it from")
    return learned


def _column(samples: Sequence[Sample], name: OptionalField) -> torch.Tensor:
    parts = [_learned_values(sample, getattr(sample, name)) for sample in samples]
    return torch.from_numpy(np.concatenate(parts))


def _learned_values(sample: Sample, values: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32]:
    learned = _learned(sample)
    return np.zeros(len(learned), dtype=np.float32) if values is None else values[learned].astype(np.float32)
