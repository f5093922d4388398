"""Attention over packed rows without a mask: each document attends to itself alone, and memory is linear in tokens.

Registered with transformers under one name, for which it builds no mask. On a GPU in bfloat16 torch's own
variable-length kernel computes all documents of a pass at once; elsewhere torch's plain causal kernel computes
document after document. Where several ranks have a row together, each computes it whole for a part of the heads.
Shapes: R rows, L width, T = R L tokens, D documents, N documents of a length, A heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from polyrl_trainer.backends.models.sequence_slices import SequenceSlices

PACKED_ATTENTION: Final = "polyrl_varlen"


@dataclass(frozen=True)
class Documents:
    """Where the sequences of a pass lie, row after row."""

    starts: torch.Tensor
    """int32[D + 1], the first token of each, and the end of the last."""
    longest: int
    """Tokens."""
    slices: SequenceSlices | None = None
    """Given: this rank has a slice of the pass, in which documents lie as they do in the whole."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Documents:
        """Documents of these lengths that follow each other without a gap."""
        return cls(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device), max(lengths))

    def arguments(self, model: PreTrainedModel) -> dict[str, Any]:
        """For a model's forward pass, where its attention is this one."""
        if model.config._attn_implementation != PACKED_ATTENTION:
            return {}
        ends = {f"cu_seq_lens_{side}": self.starts for side in ("q", "k")}
        longest = {f"max_length_{side}": self.longest for side in ("q", "k")}
        return {**ends, **longest, "sequence_slices": self.slices}


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int = 0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """[R, L, A, E] from query [R, A, L, E], key and value of as many heads or fewer; `cu_seq_lens_q`, int32[D + 1], are
    the places in the pass, row after row, where documents begin, and its end. Without it each row is a document. With
    `sequence_slices` they are those of the whole row, of which the rest is this rank's slice.

    Raises NotImplementedError for a model that bends the scores in a way that this does not know."""
    if others.get("softcap") is not None or others.get("s_aux") is not None:
        raise NotImplementedError(f"{type(module).__name__} caps its scores, or has sinks")
    rows, _, width, _ = query.shape
    starts = cu_seq_lens_q
    if starts is None:
        starts, max_length_q = torch.arange(0, rows * width + 1, width, dtype=torch.int32, device=query.device), width
    q, k, v = (one.transpose(1, 2).flatten(0, 1) for one in (query, key, value))
    slices: SequenceSlices | None = others.get("sequence_slices")
    if slices is not None:
        q, k, v = slices.to_heads(q, k, v)
    if value.is_cuda and value.dtype == torch.bfloat16:
        found = _by_kernel(q, k, v, Documents(starts, max_length_q), scaling=scaling, window=sliding_window)
    else:
        found = _by_document(q, k, v, starts, scaling=scaling, window=sliding_window)
    if slices is not None:
        found = slices.to_slices(found).to(query.dtype)
    return found.reshape(rows, width, *found.shape[1:]), None


def _by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    *,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (one if one.dtype == torch.bfloat16 else one.bfloat16() for one in (query, key, value))
    found = varlen_attn(
        q,
        k,
        v,
        documents.starts,
        documents.starts,
        documents.longest,
        documents.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(found, torch.Tensor)
    return found.to(query.dtype)


def _by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    *,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Neighbours of the same length as one batch, each other document alone: nothing is copied, nothing padded. A pass
    is packed longest first, so that those of a length are neighbours."""
    runs = [(length, len(list(same))) for length, same in groupby(starts.diff().tolist()) if length]
    tokens = [length * count for length, count in runs]
    parts = []
    # Split, not sliced: the gradient of a slice would be as long as the pass, for each document.
    for (length, count), *split in zip(runs, *(torch.split(one, tokens) for one in (query, key, value)), strict=True):
        q, k, v = (one.view(count, length, *one.shape[1:]).transpose(1, 2) for one in split)
        if window is None or window >= length:
            found = _causal(q, k, v, scaling)
        else:
            found = _windowed(q, k, v, scaling, window=window)
        parts.append(found.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None) -> torch.Tensor:
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)


def _windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None, *, window: int) -> torch.Tensor:
    """[N, A, L, E], each position sees itself and the `window - 1` before it. In blocks as long as the window, each of
    which sees itself and the block before it: the mask is that of one block."""
    length = q.shape[2]
    q, k, v = (_blocks(one, window) for one in (q, k, v))
    first = _causal(q[:, :, 0], k[:, :, 0], v[:, :, 0], scaling)
    later = q[:, :, 1:]
    seen = [torch.cat([one[:, :, :-1], one[:, :, 1:]], dim=3) for one in (k, v)]
    asked, keys, values = (one.transpose(1, 2).flatten(0, 1) for one in (later, *seen))
    behind = torch.arange(window, device=q.device)[:, None] + window - torch.arange(2 * window, device=q.device)
    mask, grouped = (behind >= 0) & (behind < window), q.shape[1] != k.shape[1]
    found = scaled_dot_product_attention(asked, keys, values, attn_mask=mask, scale=scaling, enable_gqa=grouped)
    rest = found.reshape(later.shape[0], later.shape[2], *found.shape[1:]).transpose(1, 2).flatten(2, 3)
    return torch.cat([first, rest], dim=2)[:, :, :length]


def _blocks(one: torch.Tensor, window: int) -> torch.Tensor:
    """[N, A, L, E] to [N, A, B, window, E], zeros after the end."""
    return pad(one, (0, 0, 0, -one.shape[2] % window)).view(*one.shape[:2], -1, window, one.shape[3])


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
