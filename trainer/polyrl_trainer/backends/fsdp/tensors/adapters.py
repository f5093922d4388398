"""Adapters on a model in shards: their product by rows, and the checksum of what they stand on.

An adapter's second matrix is cut by the rows of the weight that it changes, so that a rank's rows of the sum need its
own rows of both, and the first matrix whole, which is thin.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from polyrl_trainer.backends.fsdp.images.rows import SENT_BYTES
from polyrl_trainer.backends.fsdp.ranks import LEADER, Ranks
from polyrl_trainer.backends.fsdp.shard_files import HeldRows, hands_over, local_part
from polyrl_trainer.backends.models import lora


def product_of_rows(layer: Any) -> torch.Tensor:
    """`lora.whole_product` in shards; every rank calls this at the same time."""
    first, second = layer.lora_A[lora.NAME].weight, layer.lora_B[lora.NAME].weight
    rows = second.to_local() @ first.full_tensor() * layer.scaling[lora.NAME]
    shape = torch.Size([second.shape[0], first.shape[1]])
    return DTensor.from_local(
        rows, second.device_mesh, second.placements, run_check=False, shape=shape, stride=(shape[1], 1)
    )


def checksum_below(model: torch.nn.Module, ranks: Ranks) -> str:
    """`lora.base_checksum` of a single process, at the leader; every rank calls this at the same time. All rows go to
    the leader once, a piece at a time, since the sum depends on their order."""

    def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        for rank in range(ranks.place.ranks):
            if hands_over(tensor, rank):
                yield from _of_rank(rank, tensor, ranks)

    return lora.base_checksum(model, pieces)


def _of_rank(rank: int, tensor: torch.Tensor, ranks: Ranks) -> Iterator[torch.Tensor]:
    """The leader gets the rows of `rank`, any other rank nothing."""
    rows = HeldRows.of(tensor, rank)
    size = (rows.stop - rows.first) * tensor.element_size() * (tensor.numel() // max(1, tensor.shape[0]))
    if not size:
        return
    own = lora.bytes_of(local_part(tensor)) if rank == ranks.place.rank else torch.empty(size, dtype=torch.uint8)
    for piece in torch.split(own, SENT_BYTES):
        if rank == ranks.place.rank != LEADER:
            ranks.give(piece)
        elif ranks.leads:
            if rank != LEADER:
                ranks.take(piece, rank)
            yield piece
