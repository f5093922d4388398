"""Packs samples of different lengths into the rows of a pass, so that little of it is padding.

A *pass* is one forward (and backward) call on a rectangle of `len(rows)` x `width` positions. A row holds one or
several whole sequences, end to end; the rest of it is padding. Two shapes, by attention kernel:

- *dense* mask (CPU, plain GPU attention): cost grows with width squared, so rows are short: sequences are packed
  best-fit-decreasing into rows of `row_tokens`, a longer one has a row of its own, rows of like length share a pass.
- *variable-length* kernel (`models.attention`): cost grows with each sequence's own length, so a pass is one long row
  without padding.

Position ids restart at 0 with each sequence: transformers builds the block-diagonal causal mask from them, so no
sequence sees another one. Where each row of a pass holds one sequence, its padding goes on with the sequence's
positions instead of being a sequence of its own: nothing restarts then, no mask is built, and the plain causal kernel,
1.4 times as fast on a CPU at four rows of a thousand, is taken. Nothing that is learned sees what comes after it.
Shapes: R rows, L width, P learned positions.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from polyrl_trainer.backend import LossInputs
from polyrl_trainer.backends.models.attention import Documents
from polyrl_trainer.backends.models.sequence_slices import SequenceSlices
from polyrl_trainer.sample import Sample

DENSE_ROW_TOKENS = 64
"""Width aimed at with a dense mask, in tokens. Measured on 2 CPU cores, 0.6M parameters, 256 sequences of 17 tokens:
64 and below cost the same, 128 costs 10 % more, 256 40 %, 1024 three times as much."""
MAX_PADDING = 0.08
"""Largest share of padding in a pass; a row that would raise it above opens the next pass. Lower values save padding
and make more, smaller passes."""


@dataclass(frozen=True)
class PackingPolicy:
    """Shape of the passes."""

    max_tokens: int
    """Positions of one pass, padding included; only a single longer sequence may exceed it."""
    row_tokens: int
    """Width that rows are filled to."""
    one_row: bool = False
    """Variable-length kernels take exactly one row per pass."""
    slices: int = 1
    """Equal ones that a pass is cut into."""

    @classmethod
    def dense(cls, max_tokens: int) -> PackingPolicy:
        return cls(max_tokens=max_tokens, row_tokens=min(DENSE_ROW_TOKENS, max_tokens))

    @classmethod
    def variable_length(cls, max_tokens: int, slices: int = 1) -> PackingPolicy:
        return cls(max_tokens=max_tokens, row_tokens=max_tokens, one_row=True, slices=slices)

    def width(self, tokens: int) -> int:
        """Width of a row that holds so many tokens: what the slices need more is padding."""
        return -(-tokens // self.slices) * self.slices


@dataclass(frozen=True)
class Pass:
    """One rectangle."""

    rows: tuple[tuple[int, ...], ...]
    """Indices into the planned lengths, per row, in order."""
    width: int


_Row = tuple[int, tuple[int, ...]]
"""Tokens in it, and the sequences, by index."""


def plan_passes(lengths: Sequence[int], policy: PackingPolicy, together: int = 1) -> list[Pass]:
    """Puts every sequence into exactly one row of one pass; deterministic. So many consecutive sequences stay together,
    next to each other in one row: 2 for pairs.

    Each pass has at most `MAX_PADDING` of padding, and at most `policy.max_tokens` positions unless it is one row; what
    slices need more comes on top. Raises ValueError when a length is not positive, or the last ones are fewer.
    """
    if any(length < 1 for length in lengths):
        raise ValueError("a sequence must have at least one token")
    if len(lengths) % together:
        raise ValueError(f"{len(lengths)} sequences cannot be taken {together} at a time")
    units = [range(first, first + together) for first in range(0, len(lengths), together)]
    sizes = [sum(lengths[index] for index in unit) for unit in units]
    filled = sorted(_fill_rows(sizes, policy.row_tokens), key=lambda row: -row[0])
    rows = [(tokens, tuple(index for number in numbers for index in units[number])) for tokens, numbers in filled]
    return [
        Pass(tuple(indices for _, indices in group), width=policy.width(group[0][0]))
        for group in _group_rows(rows, policy)
    ]


def _fill_rows(lengths: Sequence[int], capacity: int) -> list[_Row]:
    """Best fit, longest first: each sequence goes to the fullest row that has room for it."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room left, row), sorted
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fullest = bisect_left(open_rows, (lengths[index], -1))
        if fullest < len(open_rows):
            room, row = open_rows.pop(fullest)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        insort(open_rows, (room - lengths[index], row))
    return [(sum(lengths[index] for index in indices), tuple(indices)) for indices in rows]


def _group_rows(rows: Sequence[_Row], policy: PackingPolicy) -> Iterator[list[_Row]]:
    """Cuts rows, longest first, into passes; the first row of a pass is its width."""
    group: list[_Row] = []
    used = 0
    for row in rows:
        if group:
            positions = (len(group) + 1) * group[0][0]
            padded = positions - used - row[0]
            if policy.one_row or positions > policy.max_tokens or padded > MAX_PADDING * positions:
                yield group
                group, used = [], 0
        group.append(row)
        used += row[0]
    if group:
        yield group


OPTIONAL_FIELDS = ("rollout_log_probs", "advantages", "reference_log_probs", "old_log_probs")

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
    documents: Documents
    """Padding that follows several sequences is one too; that of a row with one sequence is its end."""
    predicting: torch.Tensor
    """int64[P], flat index of the position whose output predicts a learned token: the one just before it."""
    targets: torch.Tensor
    """int64[P], the learned tokens."""
    sequence: torch.Tensor
    """int64[P]"""

    def slice(self, slices: SequenceSlices) -> PackedBatch:
        """A rank's of a pass that is one row: its tokens, and the learned ones that they predict, the first of the next
        slice among them. Documents stay those of the whole."""
        width = self.input_ids.shape[1] // slices.number
        start = slices.own * width
        own = (self.predicting >= start) & (self.predicting < start + width)
        return replace(
            self,
            input_ids=self.input_ids[:, start : start + width],
            position_ids=self.position_ids[:, start : start + width],
            documents=replace(self.documents, slices=slices),
            predicting=self.predicting[own] - start,
            targets=self.targets[own],
            sequence=self.sequence[own],
        )


def pack_pass(samples: Sequence[Sample], one: Pass, device: torch.device) -> PackedBatch:
    """Lays the samples of a pass out as its rows say. Raises ValueError when a sample's first token is to be learned:
    nothing predicts it."""
    indices = tuple(index for row in one.rows for index in row)
    input_ids = np.full((len(one.rows), one.width), PADDING_ID, dtype=np.int64)
    position_ids = np.empty_like(input_ids)
    documents: list[int] = []
    alone = all(len(row) == 1 for row in one.rows)
    for number, row in enumerate(one.rows):
        start = 0
        for sample in (samples[index] for index in row):
            end = start + sample.length
            input_ids[number, start:end] = sample.tokens
            position_ids[number, start:end] = np.arange(sample.length)
            start = end
        documents += [one.width] if alone else [samples[index].length for index in row]
        documents += [] if alone or start == one.width else [one.width - start]
        first = start if alone else 0
        position_ids[number, start:] = np.arange(first, first + one.width - start)
    predicting = _predicting(samples, one)
    counts = [len(positions) for positions in predicting]
    flat = np.concatenate(predicting)
    return PackedBatch(
        samples=tuple(samples[index] for index in indices),
        indices=indices,
        input_ids=torch.from_numpy(input_ids).to(device),
        position_ids=torch.from_numpy(position_ids).to(device),
        documents=Documents.of(documents, device),
        predicting=torch.from_numpy(flat).to(device),
        targets=torch.from_numpy(input_ids.reshape(-1)[flat + 1]).to(device),
        sequence=torch.from_numpy(np.repeat(np.arange(len(indices)), counts)).to(device),
    )


def _predicting(samples: Sequence[Sample], one: Pass) -> list[npt.NDArray[np.int64]]:
    """By sequence, in packing order: where in the pass the positions are that predict its learned tokens."""
    found: list[npt.NDArray[np.int64]] = []
    for number, row in enumerate(one.rows):
        start = number * one.width
        for sample in (samples[index] for index in row):
            found.append(learned_positions(sample) + start - 1)
            start += sample.length
    return found


def learned_counts(samples: Sequence[Sample], one: Pass, slices: int) -> list[int]:
    """Learned tokens that each slice of a pass predicts; none of a pass without rows."""
    if not one.rows:
        return [0] * slices
    width = len(one.rows) * one.width // slices
    return [int(count) for count in np.bincount(np.concatenate(_predicting(samples, one)) // width, minlength=slices)]


def loss_inputs(
    samples: Sequence[Sample],
    sequence: torch.Tensor,
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    values: torch.Tensor | None = None,
) -> LossInputs:
    """What a loss sees of samples in packing order; `sequence`, int64[P], counts along them, `log_probs`, `entropy` and
    `values` are float32[P]."""
    device = log_probs.device
    absent = frozenset(name for name in OPTIONAL_FIELDS if any(getattr(one, name) is None for one in samples))
    columns = {name: _column(samples, name).to(device) for name in OPTIONAL_FIELDS}
    mask = torch.from_numpy(np.concatenate([one.loss_mask[learned_positions(one)] for one in samples]))
    return LossInputs(
        log_probs=log_probs,
        entropy=entropy,
        mask=mask.to(device=device, dtype=torch.float32),
        sequence=sequence,
        num_sequences=len(samples),
        absent=absent,
        kept=_kept(samples, device),
        drawers=_drawers(samples, device),
        values=values,
        old_values=_where_all_have(samples, "old_values", device),
        returns=_where_all_have(samples, "returns", device),
        **columns,
    )


def _kept(samples: Sequence[Sample], device: torch.device) -> torch.Tensor | None:
    if not any(one.left_out for one in samples):
        return None
    parts = [np.full(len(learned_positions(one)), not one.left_out, dtype=np.float32) for one in samples]
    return torch.from_numpy(np.concatenate(parts)).to(device)


def unpack(samples: Sequence[Sample], values: torch.Tensor) -> list[npt.NDArray[np.float32]]:
    """float32[T] per sample, from float32[P] of all in order; 0 on positions that are not learned."""
    arrays = [np.zeros(sample.length, dtype=np.float32) for sample in samples]
    flat = values.detach().to("cpu", torch.float32).numpy()
    start = 0
    for sample, array in zip(samples, arrays, strict=True):
        learned = learned_positions(sample)
        array[learned] = flat[start : start + len(learned)]
        start += len(learned)
    return arrays


def learned_positions(sample: Sample) -> npt.NDArray[np.int64]:
    """Where `loss_mask` is not 0. Raises ValueError when the first token is among them."""
    learned: npt.NDArray[np.int64] = np.flatnonzero(sample.loss_mask)
    if len(learned) and learned[0] == 0:
        raise ValueError(f"sample {sample.id or '(unnamed)'}: its first token has no predecessor to learn it from")
    return learned


def _drawers(samples: Sequence[Sample], device: torch.device) -> torch.Tensor | None:
    arrays = [one.drawers[learned_positions(one)] for one in samples if one.drawers is not None]
    return torch.from_numpy(np.concatenate(arrays)).to(device) if len(arrays) == len(samples) else None


def _where_all_have(samples: Sequence[Sample], name: str, device: torch.device) -> torch.Tensor | None:
    return None if any(getattr(one, name) is None for one in samples) else _column(samples, name).to(device)


def _column(samples: Sequence[Sample], name: str) -> torch.Tensor:
    """float32[P]; 0 where a sample has no such values."""
    parts = []
    for sample in samples:
        values = getattr(sample, name)
        parts.append(
            (np.zeros(sample.length) if values is None else values)[learned_positions(sample)].astype(np.float32)
        )
    return torch.from_numpy(np.concatenate(parts))
