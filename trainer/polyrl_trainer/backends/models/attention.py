"""Attention over packed rows without a mask: each document attends to itself alone, and memory is linear in tokens.

Registered with transformers under one name, for which it builds no mask. On a GPU torch's own variable-length kernel
computes all documents of a pass at once; elsewhere documents of like length are laid side by side and torch's plain
causal kernel computes each batch of them. Shapes: R rows, L width, T = R L tokens, D documents, A heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

PACKED_ATTENTION: Final = "polyrl_varlen"


@dataclass(frozen=True)
class Documents:
    """Where the sequences of a pass lie, row after row."""

    starts: torch.Tensor
    """int32[D + 1], the first token of each, and the end of the last."""
    longest: int
    """Tokens."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Documents:
        """Of documents that follow each other without a gap."""
        return cls(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device), max(lengths))

    def arguments(self, model: PreTrainedModel) -> dict[str, Any]:
        """For a model's forward pass, where its attention is this one."""
        if model.config._attn_implementation != PACKED_ATTENTION:
            return {}
        ends = {f"cu_seq_lens_{side}": self.starts for side in ("q", "k")}
        return {**ends, **{f"max_length_{side}": self.longest for side in ("q", "k")}}


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
    the places in the pass, row after row, where documents begin, and its end. Without it each row is a document.

    Raises NotImplementedError for a model that bends the scores in a way that this does not know."""
    if others.get("softcap") is not None or others.get("s_aux") is not None:
        raise NotImplementedError(f"{type(module).__name__} caps its scores, or has sinks")
    rows, _, width, _ = query.shape
    starts = cu_seq_lens_q
    if starts is None:
        starts, max_length_q = torch.arange(0, rows * width + 1, width, dtype=torch.int32, device=query.device), width
    q, k, v = (one.transpose(1, 2).flatten(0, 1) for one in (query, key, value))
    if query.is_cuda:
        found = _by_kernel(q, k, v, Documents(starts, max_length_q), scaling=scaling, window=sliding_window)
    else:
        found = _by_length(q, k, v, starts, scaling=scaling, window=sliding_window)
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


def _by_length(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    *,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Batches of documents whose lengths are below the same power of two: what is computed is at most twice of what is
    needed, in each direction."""
    first, lengths = starts[:-1].long(), starts.diff().long()
    classes = torch.ceil(torch.log2(lengths.clamp(min=1).double())).long()
    found = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
    parts, places = [], []
    for one in sorted(set(classes.tolist())):
        members = classes == one
        width = int(lengths[members].max())
        # Beyond a document's end its last token stands again, which nothing before it sees.
        steps = torch.minimum(torch.arange(width), (lengths[members] - 1).clamp(min=0)[:, None])
        index = first[members][:, None] + steps
        mask = None if window is None or window >= width else _band(width, window, query.device)
        q, k, v = (each[index].transpose(1, 2) for each in (query, key, value))
        computed = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        real = torch.arange(width) < lengths[members][:, None]
        parts.append(computed.transpose(1, 2)[real])
        places.append(index[real])
    return found.index_copy(0, torch.cat(places), torch.cat(parts))


def _band(width: int, window: int, device: torch.device) -> torch.Tensor:
    """bool[width, width]: each position sees itself and the `window - 1` before it."""
    behind = torch.arange(width, device=device)[:, None] - torch.arange(width, device=device)
    return (behind >= 0) & (behind < window)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
