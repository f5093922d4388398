"""Rows in pieces, as every rank sends them, lie where the leader expects each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from polyrl_trainer.backends.fsdp.images import rows
from polyrl_trainer.backends.fsdp.images.rows import write_rows
from polyrl_trainer.backends.weight_stream import stream_bytes, stream_places, write_stream
from polyrl_trainer.weights.images import Image

WHOLE = {
    "uneven": torch.arange(23 * 6, dtype=torch.float32).reshape(23, 6),
    "one row": torch.arange(5, dtype=torch.float32).reshape(1, 5),
    "narrow": torch.arange(9, dtype=torch.float32),
    "of three": torch.arange(4 * 3 * 2, dtype=torch.float32).reshape(4, 3, 2),
}
BUFFERS = {"counter": torch.tensor(7), "table": torch.arange(6, dtype=torch.float32)}


@contextmanager
def tensors_of(rank: int, ranks: int) -> Iterator[dict[str, torch.Tensor]]:
    """As FSDP holds them on that rank, in a group that only this process is in."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        held: dict[str, torch.Tensor] = dict(BUFFERS)
        for name, tensor in WHOLE.items():
            each = -(-len(tensor) // ranks)
            own = tensor[rank * each : (rank + 1) * each].clone()
            held[name] = DTensor.from_local(
                own, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
        yield held
    finally:
        dist.destroy_process_group()


def whole_image() -> Image:
    images: list[Image] = []

    def room(size: int) -> Image:
        images.append(Image(size))
        return images[-1]

    write_stream(WHOLE | BUFFERS, room, torch.bfloat16)
    return images[-1]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 30])
def test_rows_of_all_ranks_are_the_stream_of_one_process(ranks: int) -> None:
    wanted, image = whole_image(), Image(len(whole_image().data))
    image.data[:] = b"\xff" * len(image.data)
    for rank in range(ranks):
        with tensors_of(rank, ranks) as held:
            places = stream_places(held, torch.bfloat16)
            assert stream_bytes(places) == len(image.data)
            write_rows(held, places, image.data, rank)
    assert image.data == wanted.data


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_pieces_that_are_sent_lie_as_rows_that_are_written(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "SENT_BYTES", 16)
    wanted, image = whole_image(), Image(len(whole_image().data))
    given: dict[int, list[torch.Tensor]] = {}
    for rank in range(1, ranks):
        with tensors_of(rank, ranks) as held:
            given[rank] = list(rows._own_pieces(rank, held, stream_places(held, torch.bfloat16)))
    with tensors_of(0, ranks) as held:
        places = stream_places(held, torch.bfloat16)
        write_rows(held, places, image.data, 0)
        for rank, pieces in given.items():
            for piece, room in zip(pieces, rows._pieces_of(rank, held, places, image.data), strict=True):
                room.copy_(piece)
    assert image.data == wanted.data
