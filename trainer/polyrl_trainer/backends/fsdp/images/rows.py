"""Every rank copies its own rows of every tensor to their places in the image of a version, all at the same time.

A rank on the leader's machine writes the image itself. One elsewhere has no part of that memory: it sends its rows, a
piece at a time, which the leader receives in their places. What is not sharded, the leader writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Final

import torch

from polyrl.weights import TensorEntry
from polyrl_trainer.backends.fsdp.ranks import Ranks
from polyrl_trainer.backends.fsdp.shard_files import HeldRows, hands_over, local_part
from polyrl_trainer.backends.weight_stream import DTYPES, tensor_at

SENT_BYTES: Final = 32 << 20
"""Of rows on their way to the leader: what a rank holds of them beside its shard."""

Tensors = Mapping[str, torch.Tensor]


@torch.no_grad()
def export_rows(
    tensors: Tensors, places: Sequence[TensorEntry], find: Callable[[], memoryview | None], ranks: Ranks
) -> None:
    """Every rank calls this at the same time. `find` gives the image, None where this rank has to send. Raises on every
    rank when a rank cannot map or write it."""
    image = ranks.together(find)
    elsewhere = [rank for rank, sends in enumerate(ranks.flags(image is None)) if sends]
    ranks.together(lambda: None if image is None else write_rows(tensors, places, image, ranks.place.rank))
    for rank in elsewhere:
        if rank == ranks.place.rank:
            for piece in _own_pieces(rank, tensors, places):
                ranks.give(piece)
        elif ranks.leads and image is not None:
            for piece in _pieces_of(rank, tensors, places, image):
                ranks.take(piece, rank)


def write_rows(tensors: Tensors, places: Sequence[TensorEntry], image: memoryview, rank: int) -> None:
    """This rank's part."""
    for place in places:
        tensor = tensors[place.name]
        if hands_over(tensor, rank):
            rows = HeldRows.of(tensor)
            whole = tensor_at(image, place)
            part = whole[rows.first : rows.stop] if tensor.ndim else whole
            part.copy_(local_part(tensor))


def _own_pieces(rank: int, tensors: Tensors, places: Sequence[TensorEntry]) -> Iterator[torch.Tensor]:
    """uint8, of at most SENT_BYTES, in the stream's order."""
    for place in places:
        if hands_over(tensor := tensors[place.name], rank):
            dtype = DTYPES[place.dtype]
            for rows in torch.split(local_part(tensor).reshape(-1), SENT_BYTES // dtype.itemsize):
                if rows.numel():
                    yield rows.to("cpu", dtype).contiguous().view(torch.uint8)


def _pieces_of(rank: int, tensors: Tensors, places: Sequence[TensorEntry], image: memoryview) -> Iterator[torch.Tensor]:
    """Where another rank's pieces belong, sharing the image's memory."""
    for place in places:
        if hands_over(tensor := tensors[place.name], rank):
            rows = HeldRows.of(tensor, rank)
            row_bytes = DTYPES[place.dtype].itemsize * prod(place.shape[1:])
            begin, end = (place.offset + row * row_bytes for row in (rows.first, rows.stop))
            if begin < end:
                yield from torch.split(torch.frombuffer(image[begin:end], dtype=torch.uint8), SENT_BYTES)
