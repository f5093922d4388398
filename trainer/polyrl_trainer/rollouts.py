"""The port between loops and whoever generates: `client.RolloutClient` over sockets, or a test's fake in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

import numpy.typing as npt

from polyrl.sample import DiscardReason, Group, Purpose
from polyrl.weights import WeightsRef
from polyrl.wire import Batch, EngineMeasure, GroupDropped, TurnDone


class Rollouts(Protocol):
    """Groups in, scored samples out. Every call is safe to repeat, and ends: with its answer or DeadlineExceeded."""

    async def publish(self, weights: WeightsRef) -> None:
        """Announces a weight version; agents pull it from where `weights` says."""

    def served_at(self, version: int) -> float | None:
        """Monotonic time at which the first engine had it verified; None: not known."""

    async def submit(self, groups: Sequence[Group]) -> None:
        """Requests these groups; a number already known is ignored. Raises RequestRefused for groups that cannot be."""

    def turns(self) -> AsyncIterator[TurnDone]:
        """Finished turns that await a verdict; a turn may be repeated until it has one."""

    async def score(self, sample: str, turn: int, reward: float, metrics: Mapping[str, float]) -> None:
        """The sample is finished and worth `reward`; `metrics` are its named components."""

    async def extend(self, sample: str, turn: int, ids: npt.ArrayLike) -> None:
        """An environment wrote the tokens `ids` (one or more) after `turn`; the next turn is generated after them."""

    async def reject(self, sample: str, reason: DiscardReason, detail: str) -> None:
        """No reward can be had for this sample: its group will be dropped."""

    async def next(
        self,
        step: int,
        *,
        purpose: Purpose,
        min_samples: int,
        max_samples: int,
        max_tokens: int,
        deadline_s: float,
        alone: bool = False,
    ) -> Batch:
        """Complete, scored groups of `step`, in arrival order: see `wire.BatchRequest`. `alone`: once the engines on
        the trainer's devices sleep, and until the next request.

        Raises DeadlineExceeded after `deadline_s`; its text names who is awaited, since when.
        """

    async def acknowledge(self, batch: int) -> None:
        """The batch is part of the trainer's state; the manager forgets its tokens."""

    @property
    def acknowledged(self) -> Sequence[tuple[int, int]]:
        """The batches that the trainer's state contains, as half-open ranges of their numbers; part of a checkpoint."""

    def cover(self, batches: Sequence[tuple[int, int]]) -> None:
        """A checkpoint that survives this process contains these acknowledged batches, ranges as in `acknowledged`."""

    async def end_step(self, step: int, purpose: Purpose) -> None:
        """What is left of `step` is cancelled as surplus."""

    async def report(
        self,
        phase: str,
        step: int,
        values: Mapping[str, float],
        samples: Sequence[bytes] = (),
        engines: Sequence[EngineMeasure] = (),
    ) -> None:
        """What people see of a step or an evaluation: its numbers, and lines of samples.jsonl to read. In the run's
        status the newest report wins. `engines`: what the learner saw of those that drew the step's tokens."""

    def dropped(self) -> AsyncIterator[GroupDropped]:
        """Groups of which nothing will be trained, each once; submit another in the place of each."""
