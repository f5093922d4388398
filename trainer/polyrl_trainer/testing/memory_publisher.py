"""A publisher for loops without receivers: what is published goes to a function of the test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from polyrl.weights import TensorEntry, WeightsRef
from polyrl_trainer.backend import BufferOf, BufferPlace, WeightsBuffer
from polyrl_trainer.backends.fsdp.images.mapped import MappedImages
from polyrl_trainer.backends.weight_stream import stream_bytes, tensor_at, write_stream
from polyrl_trainer.weights.images import Image
from polyrl_trainer.weights.publisher import Export

Tensors: TypeAlias = list[tuple[str, torch.Tensor]]


def exported_tensors(export: Export) -> Tensors:
    """What an export copies, by name, in a memory of its own."""
    buffers = MemoryBuffers()
    return [(place.name, tensor_at(buffers.data, place)) for place in export(buffers)]


class MemoryBuffers:
    """Buffers in this machine's memory, as long as this lives."""

    data = memoryview(b"")
    """Memory of the last buffer."""

    def __call__(self, places: Sequence[TensorEntry]) -> WeightsBuffer:
        self._image = Image(stream_bytes(places))
        self.data = self._image.data
        return WeightsBuffer(self.data, (BufferPlace(self._image.path, self._image.name, begin=0, end=len(self.data)),))


def spread(tensors: Mapping[str, torch.Tensor], buffer: BufferOf) -> list[TensorEntry]:
    """An export as ranks of several machines make it, all of which are this one."""
    whole, mapped = MemoryBuffers(), MappedImages()
    places = write_stream(tensors, whole)
    for one in buffer(places).places:
        mapped.find(one)[:] = whole.data[one.begin : one.end]
    return places


class MemoryPublisher:
    """Fits where a `WeightPublisher` is asked for."""

    def __init__(self, publish: Callable[[int, Tensors], WeightsRef] = lambda version, tensors: WeightsRef(version)):
        self._publish = publish

    @property
    def measures(self) -> dict[str, float]:
        return {}

    def snapshot(self, export: Export, files: dict[str, bytes]) -> Tensors:
        return exported_tensors(export)

    def drop(self, snapshot: Tensors) -> None:
        """Nothing is kept."""

    def content(self, snapshot: Tensors) -> bytes:
        return b""

    def publish_snapshot(self, version: int, snapshot: Tensors) -> WeightsRef:
        """Whatever the test says of it."""
        return self._publish(version, snapshot)
