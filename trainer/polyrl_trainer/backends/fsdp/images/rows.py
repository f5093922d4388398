"""Every rank copies its own rows of every tensor to their places in the images of a version, all at the same time.

An image is of a part of the stream, on one machine. Its ranks write it themselves; those of other machines send what
they have of that part, a piece at a time, to its first rank, which receives it in its place. So no machine gets more
than its part. What is not sharded, the leader gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import torch

from polyrl.weights import TensorEntry
from polyrl_trainer.backend import BufferPlace
from polyrl_trainer.backends.fsdp.ranks import Ranks
from polyrl_trainer.backends.fsdp.shard_files import HeldRows, hands_over, local_part
from polyrl_trainer.backends.weight_stream import DTYPES

SENT_BYTES: Final = 32 << 20
"""Bytes of rows on their way to another machine; `ranks.UNDER_WAY` of these a rank holds beside its shard."""

Tensors = Mapping[str, torch.Tensor]
Piece = tuple[torch.Tensor, int]
"""uint8, and whom it goes to or comes from."""


@torch.no_grad()
def export_rows(
    tensors: Tensors,
    places: Sequence[TensorEntry],
    buffers: Sequence[BufferPlace],
    find: Callable[[BufferPlace], memoryview],
    ranks: Ranks,
) -> None:
    """Every rank calls this at the same time, with a buffer for each machine, which has equally many of them. `find`
    gives the image of its own. Raises on every rank when a rank cannot map or write it."""
    own, each = ranks.place.rank, ranks.place.ranks // len(buffers)
    here = own // each
    image = ranks.together(lambda: find(buffers[here]))
    ranks.together(lambda: write_rows(tensors, places, buffers[here], image, own, near=here * each))
    if len(buffers) > 1:
        first = here * each
        elsewhere = [rank for rank in range(ranks.place.ranks) if rank // each != here]
        takes = (
            piece for rank in elsewhere for piece in taken(tensors, places, buffers[here], image, rank, near=first)
        )
        # Each begins with another one, so that all links are busy.
        others = [(here + step) % len(buffers) for step in range(1, len(buffers))]
        gives = (piece for to in others for piece in given(tensors, places, buffers[to], own, near=to * each))
        ranks.exchange(takes if own == first else (), gives)
        ranks.together(lambda: None)


def write_rows(
    tensors: Tensors, places: Sequence[TensorEntry], buffer: BufferPlace, image: memoryview, rank: int, near: int
) -> None:
    """Writes this process's rows (`rank` is its own number) into its machine's image; `near` is that machine's first
    rank."""
    for part in _parts(tensors, places, buffer, rank, near=near):
        torch.frombuffer(part.of(image), dtype=part.dtype).copy_(part.values(tensors))


def given(
    tensors: Tensors, places: Sequence[TensorEntry], buffer: BufferPlace, rank: int, near: int
) -> Iterator[Piece]:
    """This process's rows (`rank` is its own number) that belong into another machine's image, in pieces of at most
    SENT_BYTES."""
    for part in _parts(tensors, places, buffer, rank, near=near):
        for values in torch.split(part.values(tensors), SENT_BYTES // part.dtype.itemsize):
            yield values.to("cpu", part.dtype).contiguous().view(torch.uint8), near


def taken(
    tensors: Tensors, places: Sequence[TensorEntry], buffer: BufferPlace, image: memoryview, rank: int, near: int
) -> Iterator[Piece]:
    """Where what another `rank` gives belongs, sharing the image's memory."""
    for part in _parts(tensors, places, buffer, rank, near=near):
        for piece in torch.split(torch.frombuffer(part.of(image), dtype=torch.uint8), SENT_BYTES):
            yield piece, rank


@dataclass(frozen=True)
class _Part:
    """Bytes [begin, end) of the stream, which a rank has of one tensor for one buffer."""

    name: str
    dtype: torch.dtype
    begin: int
    end: int
    first: int
    """Where the rank's rows of the tensor begin."""
    buffer: int
    """Where the buffer does."""

    def of(self, image: memoryview) -> memoryview:
        return image[self.begin - self.buffer : self.end - self.buffer]

    def values(self, tensors: Tensors) -> torch.Tensor:
        """Values of this process's rows, as they are held."""
        begin, end = ((at - self.first) // self.dtype.itemsize for at in (self.begin, self.end))
        return local_part(tensors[self.name]).reshape(-1)[begin:end]


def _parts(
    tensors: Tensors, places: Sequence[TensorEntry], buffer: BufferPlace, rank: int, *, near: int
) -> Iterator[_Part]:
    for place in places:
        tensor, dtype = tensors[place.name], DTYPES[place.dtype]
        if not hands_over(tensor, rank, near):
            continue
        rows, row_bytes = HeldRows.of(tensor, rank), dtype.itemsize * prod(place.shape[1:])
        first, stop = (place.offset + row * row_bytes for row in (rows.first, rows.stop))
        begin, end = max(first, buffer.begin), min(stop, buffer.end)
        if begin < end:
            yield _Part(place.name, dtype, begin=begin, end=end, first=first, buffer=buffer.begin)
