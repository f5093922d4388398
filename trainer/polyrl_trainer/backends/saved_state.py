"""A learner's state as it is saved: copied into memory of the host at once, and written beside the next steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import TypeVar

import torch

from polyrl.errors import DeadlineExceeded
from polyrl_trainer.checkpoints.writer import Writer

R = TypeVar("R")
TensorFiles = Mapping[str, Mapping[str, torch.Tensor]]
"""By a file's name, then the tensor's."""


class SavedState:
    """State of one model. One save after the other has the same memory: pages that are touched for the first time take
    ten times as long, and a step waits for them."""

    def __init__(self, wait_seconds: float, writer: Writer | None = None) -> None:
        """`writer`: one for several models that are written in one order."""
        self._wait_seconds = wait_seconds
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}
        self._writer = writer or Writer("saved state")
        self._last: Future[None] | None = None

    @torch.no_grad()
    def write(self, files: TensorFiles, work: Callable[[TensorFiles], None], *, copied: bool = True) -> Future[None]:
        """Copies `files`, and has `work` write the copy; not `copied`, it writes what they are, one tensor after the
        other. Raises DeadlineExceeded when the save before does not end."""
        if self._last is not None and not wait([self._last], self._wait_seconds).done:
            raise DeadlineExceeded("the save before to be written", "the disk", self._wait_seconds)
        held = self._copied(files) if copied else files
        for device in {one.device for tensors in files.values() for one in tensors.values() if one.is_cuda}:
            torch.cuda.synchronize(device)
        self._last = self._writer.submit(lambda: work(held))
        return self._last

    def _copied(self, files: TensorFiles) -> TensorFiles:
        return {
            file: {name: self._copy((file, name), tensor) for name, tensor in tensors.items()}
            for file, tensors in files.items()
        }

    def _copy(self, key: tuple[str, str], tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            # What is pinned, a GPU writes at its link's full speed, all tensors at once.
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)
