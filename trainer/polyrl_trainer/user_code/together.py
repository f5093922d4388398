"""Samples that share a call: `score_batch` gets what waits when a worker is free, `score_group` all samples
of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from polyrl.sample import split_sample_id
from polyrl_trainer.sample import Sample
from polyrl_trainer.user_code.verdicts import Unscored, Verdict

Judge = Callable[[Sequence[Sample]], Awaitable[Sequence[Verdict]]]
"""One call; a verdict for each sample."""


class Together(Protocol):
    """Which samples one call judges."""

    async def verdict(self, sample: Sample, n: int) -> Verdict:
        """The verdict on this sample, one of the `n` of its prompt."""

    def forget(self, group: int) -> None:
        """The group is over; whatever of it has not been asked for is not."""


@dataclass(eq=False)
class Alone:
    """A call for each sample, at once."""

    judge: Judge

    async def verdict(self, sample: Sample, n: int) -> Verdict:
        """See `Together`."""
        (verdict,) = await self.judge([sample])
        return verdict

    def forget(self, group: int) -> None:
        """See `Together`."""


@dataclass(eq=False)
class Waiting:
    """A sample whose verdict is awaited."""

    sample: Sample
    verdict: asyncio.Future[Verdict] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


async def _settle(waiting: Sequence[Waiting], judge: Judge) -> None:
    try:
        verdicts = await judge([one.sample for one in waiting])
        for one, verdict in zip(waiting, verdicts, strict=True):
            if not one.verdict.done():
                one.verdict.set_result(verdict)
    except BaseException as error:  # noqa: BLE001 - each of them raises it
        for one in waiting:
            if not one.verdict.done():
                one.verdict.set_exception(error)


@dataclass(eq=False)
class Batches:
    """As many calls at once as workers take; what comes meanwhile waits, and goes together."""

    judge: Judge
    most: int
    """Samples of one call."""
    at_once: int
    """Calls."""
    _waiting: list[Waiting] = field(default_factory=list)
    _calls: set[asyncio.Task[None]] = field(default_factory=set)

    async def verdict(self, sample: Sample, n: int) -> Verdict:
        """See `Together`."""
        mine = Waiting(sample)
        self._waiting.append(mine)
        if len(self._calls) < self.at_once:
            call = asyncio.create_task(self._call_while_they_wait())
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        return await mine.verdict

    def forget(self, group: int) -> None:
        """See `Together`."""
        over = [one for one in self._waiting if one.sample.group == group]
        self._waiting = [one for one in self._waiting if one.sample.group != group]
        for one in over:
            one.verdict.cancel()

    async def _call_while_they_wait(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self.most], self._waiting[self.most :]
            await _settle(batch, self._judge_apart_if_all_fail)

    async def _judge_apart_if_all_fail(self, samples: Sequence[Sample]) -> Sequence[Verdict]:
        """One that hangs, raises or ends the worker takes all of its batch with it, so each is then called alone."""
        verdicts = await self.judge(samples)
        if len(samples) == 1 or not all(isinstance(one, Unscored) for one in verdicts):
            return verdicts
        return [verdict for sample in samples for verdict in await self.judge([sample])]


@dataclass(eq=False)
class Groups:
    """One call for each prompt, once all its samples are finished."""

    judge: Judge
    _groups: dict[int, list[Waiting]] = field(default_factory=dict)

    async def verdict(self, sample: Sample, n: int) -> Verdict:
        """See `Together`."""
        mine = Waiting(sample)
        group = self._groups.setdefault(sample.group, [])
        group.append(mine)
        if len(group) == n:
            await _settle(sorted(group, key=lambda one: split_sample_id(one.sample.id)), self.judge)
            self._groups.pop(sample.group, None)
        return await mine.verdict

    def forget(self, group: int) -> None:
        """See `Together`."""
        for one in self._groups.pop(group, ()):
            one.verdict.cancel()
