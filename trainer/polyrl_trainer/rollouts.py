"""The port between loops and whoever generates: `client.RolloutClient` over sockets, or a test's fake in memory.

Every call is safe to repeat, and ends: with its answer, or with DeadlineExceeded naming who is awaited.

Refuses to hold: sockets (see `client`), rewards (see `loop_host`), what to submit (see `rl_loop`).
Read next: `loop_host`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

import numpy.typing as npt

from polyrl.sample import DiscardReason, Group, Purpose
from polyrl.wire import Batch, GroupDropped, TurnDone


class Rollouts(Protocol):
    """Groups in, scored samples out."""

    async def publish(self, version: int, endpoint: str, public_key: str, manifest_hash: bytes) -> None:
        """Announces a weight version that can be pulled at `endpoint`."""
        ...

    async def submit(self, groups: Sequence[Group]) -> None:
        """Asks for these groups; a number already known is ignored."""
        ...

    def turns(self) -> AsyncIterator[TurnDone]:
        """Finished turns that await a verdict; a turn may come again until it has one."""
        ...

    async def score(self, sample: str, turn: int, reward: float, metrics: Mapping[str, float]) -> None:
        """The sample is finished and worth `reward`."""
        ...

    async def extend(self, sample: str, turn: int, ids: npt.ArrayLike) -> None:
        """An environment wrote `ids` after `turn`; generate the next one."""
        ...

    async def reject(self, sample: str, reason: DiscardReason, detail: str) -> None:
        """No reward can be had for this sample."""
        ...

    async def next(
        self, step: int, *, purpose: Purpose, min_samples: int, max_samples: int, max_tokens: int, deadline_s: float
    ) -> Batch:
        """Complete groups in arrival order. Raises DeadlineExceeded naming who was awaited."""
        ...

    async def acknowledge(self, batch: int) -> None:
        """The batch is part of the trainer's state."""
        ...

    async def end_step(self, step: int, purpose: Purpose) -> None:
        """Cancels what is left of `step` as surplus."""
        ...

    async def reserved_window(self, open: bool) -> None:  # noqa: A002 - the wire's own word
        """Lets engines on the trainer's devices generate, or takes the devices back."""
        ...

    async def report(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """What status shows; the newest report wins."""
        ...

    def dropped(self) -> AsyncIterator[GroupDropped]:
        """Groups of which nothing will be trained, each once."""
        ...
