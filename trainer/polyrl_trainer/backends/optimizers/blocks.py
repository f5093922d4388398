"""Moments in 8 bits (Dettmers et al. 2021, arXiv 2110.02861): of each value of a block of a row the nearest of 256
shares of the block's largest.

Codes and shares are those of bitsandbytes and torchao, but for one: a second moment never becomes 0. Beside a first
moment that does not, it would make of the next step without a gradient, as most tokens' embeddings have, one of first
moment / eps.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

from polyrl.memory.moments import BLOCK

DECADES: Final = 7
"""Powers of ten that shares span."""
LEAST_SCALE: Final = 1e-30
"""Scale of a block of zeros, below the square of any gradient that moves a weight; its least share is a normal float32
still. With torchao's 1e-12 gradients of 1e-6 and less moved weights by up to 0.7 and 1.6 times what they should."""
SCALE: Final = "_scale"
"""After a moment's name: float32[rows, columns / BLOCK] beside its codes, uint8[rows, columns]."""


@cache
def shares(signed: bool, device: torch.device) -> torch.Tensor:
    """float32[256], ascending from -1 or 0 to 1: each decade has twice as many as the one below."""
    found = [0.0, 1.0]
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, 1 + (1 << (decade if signed else decade + 1)))
        above = (10.0 ** (decade + 1 - DECADES) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        found += above + [-one for one in above] if signed else above
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)


@cache
def _borders(signed: bool, device: torch.device) -> torch.Tensor:
    """float32[255]: halfway between two shares; of a second moment 0 has no room."""
    found = shares(signed, device)
    borders = (found[:-1] + found[1:]) / 2
    if not signed:
        borders[0] = -1.0
    return borders


def quantize(values: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, *, signed: bool) -> None:
    """Writes `values`, float32[rows, columns], into `codes` and `scale`."""
    blocks = values.view(-1, BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True).clip_(min=LEAST_SCALE)
    found = torch.bucketize(blocks / largest, _borders(signed, values.device), out_int32=True, right=True)
    codes.copy_(found.view(codes.shape))
    scale.copy_(largest.view(scale.shape))


def dequantize(codes: torch.Tensor, scale: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Inverse of `quantize`, nearly: float32[rows, columns]."""
    found = shares(signed, codes.device).index_select(0, codes.reshape(-1).int())
    return found.view(-1, BLOCK).mul_(scale.reshape(-1, 1)).view(codes.shape)
