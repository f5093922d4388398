"""Rows in pieces, as every rank sends them to other machines, lie where these expect each of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from polyrl_trainer.backend import BufferPlace
from polyrl_trainer.backends.fsdp.images import rows
from polyrl_trainer.backends.fsdp.images.rows import given, taken, write_rows
from polyrl_trainer.backends.weight_stream import stream_bytes, stream_places, write_stream
from polyrl_trainer.testing.memory_publisher import MemoryBuffers
from polyrl_trainer.weights.images import Image

WHOLE = {
    "uneven": torch.arange(23 * 6, dtype=torch.float32).reshape(23, 6),
    "one row": torch.arange(5, dtype=torch.float32).reshape(1, 5),
    "narrow": torch.arange(9, dtype=torch.float32),
    "of three": torch.arange(4 * 3 * 2, dtype=torch.float32).reshape(4, 3, 2),
}
BUFFERS = {"counter": torch.tensor(7), "table": torch.arange(6, dtype=torch.float32)}


@contextmanager
def tensors_of(rank: int, ranks: int, copies: int = 1) -> Iterator[dict[str, torch.Tensor]]:
    """As FSDP holds them on that rank, in a group that only this process is in."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        shards = ranks // copies
        mesh = init_device_mesh("cpu", (copies, shards))
        held: dict[str, torch.Tensor] = dict(BUFFERS)
        for name, tensor in WHOLE.items():
            each, place = -(-len(tensor) // shards), rank % shards
            own = tensor[place * each : (place + 1) * each].clone()
            held[name] = DTensor.from_local(
                own, mesh, [Replicate(), Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
        yield held
    finally:
        dist.destroy_process_group()


def whole() -> memoryview:
    buffers = MemoryBuffers()
    write_stream(WHOLE | BUFFERS, buffers, torch.bfloat16)
    return buffers.data


def buffers_of(machines: int) -> tuple[list[BufferPlace], list[Image]]:
    """Cut anywhere between elements, each with a little of the next one's."""
    size = len(whole())
    cuts = [size * number // machines // 8 * 8 for number in range(machines)] + [size]
    ends = [(begin, min(size, end + 16)) for begin, end in pairwise(cuts)]
    images = [Image(end - begin) for begin, end in ends]
    for image in images:
        image.data[:] = b"\xff" * len(image.data)
    return [BufferPlace("", str(begin), begin=begin, end=end) for begin, end in ends], images


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 30])
def test_rows_of_all_ranks_are_the_stream_of_one_process(ranks: int) -> None:
    (buffer,), (image,) = buffers_of(1)
    for rank in range(ranks):
        with tensors_of(rank, ranks) as held:
            places = stream_places(held, torch.bfloat16)
            assert stream_bytes(places) == len(image.data)
            write_rows(held, places, buffer, image.data, rank, near=0)
    assert image.data == whole()


@pytest.mark.parametrize(("machines", "each"), [(2, 1), (2, 2), (3, 1), (3, 2), (2, 7), (7, 1)])
@pytest.mark.parametrize("copies", [1, 2])
def test_pieces_that_are_sent_lie_as_rows_that_are_written(
    machines: int, each: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And between any two ranks both see the same pieces in the same order."""
    monkeypatch.setattr(rows, "SENT_BYTES", 16)
    ranks = machines * each
    if ranks % copies:
        pytest.skip("copies are of equally many ranks")
    (buffers, images), sent, awaited = buffers_of(machines), defaultdict(list), defaultdict(list)
    for rank in range(ranks):
        with tensors_of(rank, ranks, copies) as held:
            places = stream_places(held, torch.bfloat16)
            for number, (buffer, image) in enumerate(zip(buffers, images, strict=True)):
                first = number * each
                if rank // each == number:
                    write_rows(held, places, buffer, image.data, rank, near=first)
                else:
                    sent[rank, first] += [piece for piece, _ in given(held, places, buffer, rank, near=first)]
                if rank == first:
                    for other in set(range(ranks)) - set(range(first, first + each)):
                        pieces = taken(held, places, buffer, image.data, other, near=first)
                        awaited[other, first] += [piece for piece, _ in pieces]
    for way, pieces in sent.items():
        for piece, room_of in zip(pieces, awaited[way], strict=True):
            room_of.copy_(piece)
    for buffer, image in zip(buffers, images, strict=True):
        assert image.data == whole()[buffer.begin : buffer.end]
    if copies == machines:
        assert {way for way, pieces in sent.items() if pieces} <= {(0, each)}, (
            "each has a copy, and tables are the leader's"
        )
