"""A publisher for loops without receivers: what is published goes to a function of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch

from polyrl.weights import WeightsRef

Tensors: TypeAlias = list[tuple[str, torch.Tensor]]


class MemoryPublisher:
    """Fits where a `WeightPublisher` is asked for."""

    def __init__(self, publish: Callable[[int, Tensors], WeightsRef] = lambda version, tensors: WeightsRef(version)):
        self._publish = publish

    @property
    def measures(self) -> dict[str, float]:
        return {}

    def snapshot(self, tensors: Iterable[tuple[str, torch.Tensor]], files: dict[str, bytes]) -> Tensors:
        return list(tensors)

    def drop(self, snapshot: Tensors) -> None:
        """Nothing is kept."""

    def content(self, snapshot: Tensors) -> bytes:
        return b""

    def publish_snapshot(self, version: int, snapshot: Tensors) -> WeightsRef:
        """Whatever the test says of it."""
        return self._publish(version, snapshot)
