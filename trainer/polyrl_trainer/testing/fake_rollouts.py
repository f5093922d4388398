"""`Rollouts` in memory, for tests and for trying a loop without processes: a function writes the responses.

Turns come back in a random order drawn from a seed, as from a fleet; groups complete when all their samples are
scored; batches follow the ledger's rules (whole groups, order of completion, at least the minimum unless nothing
more can come). Any group can be made to vanish with a reason.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from polyrl.errors import DeadlineExceeded
from polyrl.sample import DiscardReason, Finish, Group, Purpose, Response, Scored, Span, sample_id, split_sample_id
from polyrl.weights import WeightsRef
from polyrl.wire import Batch, EngineMeasure, GroupDropped, TurnDone, pack_ids
from polyrl_trainer.client.conversation import EventStream

Write = Callable[[Group, int, list[int]], list[int]]
"""(group, index, response so far) to the tokens of the next turn."""

Lose = Callable[[Group], DiscardReason | None]
"""Why a group vanishes right after its submission; None lets it be."""

LOG_PROB = -0.5
"""Logprob of every token; the fake has no model to ask."""


@dataclass
class _Open:
    group: Group
    version: int
    """Weight version of all its tokens."""
    responses: dict[int, list[int]] = field(default_factory=dict)
    masks: dict[int, list[int]] = field(default_factory=dict)
    turns: dict[int, int] = field(default_factory=dict)
    scored: dict[int, Scored] = field(default_factory=dict)


class FakeRollouts:
    """See the module."""

    def __init__(self, write: Write, *, seed: int = 0, lose: Lose = lambda group: None) -> None:
        self._write = write
        self._lose = lose
        self._random = random.Random(seed)
        self._open: dict[int, _Open] = {}
        self._complete: list[int] = []
        self._turns, self._drops = EventStream[TurnDone](), EventStream[GroupDropped]()
        self._changed = asyncio.Event()
        self._early: list[Group] = []
        """Whose version is yet to be published."""
        self._batches: dict[int, tuple[int, ...]] = {}
        self.submitted: list[Group] = []
        self.groups_acknowledged: list[int] = []
        self.alone: list[bool] = []
        """What each request for a batch said of `alone`."""
        self.discarded: dict[int, DiscardReason] = {}
        self.published: list[int] = []
        self.reports: list[tuple[str, int, dict[str, float]]] = []

    async def publish(self, weights: WeightsRef) -> None:
        self.published.append(weights.version)
        early, self._early = self._early, []
        await self._begin_known([group for group in early if group.id in self._open])

    def served_at(self, version: int) -> float | None:
        return time.monotonic() if version in self.published else None

    async def submit(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self.submitted.append(group)
            reason = self._lose(group)
            self._open[group.id] = _Open(group, -1)
            if reason is not None:
                self._drop(group.id, reason, "made to vanish")
        await self._begin_known(groups)

    async def _begin_known(self, groups: Sequence[Group]) -> None:
        newest = max(self.published, default=-1)
        self._early += [group for group in groups if group.min_version > newest]
        await self.begin([group for group in groups if group.min_version <= newest])

    async def begin(self, groups: Sequence[Group]) -> None:
        """Generates them all, with the version that was published last."""
        newest = max(self.published, default=-1)
        for group in groups:
            assert newest <= group.max_version, "no published version may generate it"
            if group.id in self._open:
                self._open[group.id].version = newest
        samples = [(group, index) for group in groups for index in range(group.n)]
        self._random.shuffle(samples)
        for group, index in samples:
            self._end_turn(group, index)

    def turns(self) -> AsyncIterator[TurnDone]:
        return aiter(self._turns)

    def ask_again(self) -> None:
        """Another trainer is there: every verdict that is missing is asked of it, and of no other."""
        self._turns = EventStream[TurnDone]()
        for entry in self._open.values():
            for index in sorted(entry.responses.keys() - entry.scored.keys()):
                self._ask(entry, index)

    async def score(self, sample: str, turn: int, reward: float, metrics: Mapping[str, float]) -> None:
        number, index = split_sample_id(sample)
        entry = self._open.get(number)
        if entry is None or index in entry.scored:
            return
        entry.scored[index] = Scored(
            number, index, response=self._response(entry, index), reward=reward, metrics=dict(metrics)
        )
        if len(entry.scored) == entry.group.n:
            self._complete.append(number)
            self._changed.set()

    async def extend(self, sample: str, turn: int, ids: npt.ArrayLike) -> None:
        number, index = split_sample_id(sample)
        entry = self._open[number]
        written = [int(token) for token in np.asarray(ids)]
        entry.responses[index] += written
        entry.masks[index] += [0] * len(written)
        entry.turns[index] += 1
        self._end_turn(entry.group, index)

    async def reject(self, sample: str, reason: DiscardReason, detail: str) -> None:
        self._drop(split_sample_id(sample)[0], reason, detail)

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
        self.alone.append(alone)
        try:
            async with asyncio.timeout(deadline_s):
                while (picked := self._pick(step, purpose, min_samples, max_samples)) is None:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"a batch of step {step} ({purpose})", "the rollouts", deadline_s) from None
        number = len(self._batches)
        self._batches[number] = tuple(picked)
        samples = [scored for group in picked for scored in self._open.pop(group).scored.values()]
        self._complete = [group for group in self._complete if group not in picked]
        return Batch(0, number, step=step, samples=tuple(samples), last=not self._of(step, purpose))

    async def acknowledge(self, batch: int) -> None:
        self.groups_acknowledged += self._batches[batch]

    @property
    def acknowledged(self) -> list[tuple[int, int]]:
        return []

    def cover(self, batches: Sequence[tuple[int, int]]) -> None:
        """Nothing is kept here."""

    async def end_step(self, step: int, purpose: Purpose) -> None:
        for group in self._of(step, purpose):
            self._drop(group, DiscardReason.SURPLUS, "", notify=False)

    async def report(
        self,
        phase: str,
        step: int,
        values: Mapping[str, float],
        samples: Sequence[bytes] = (),
        engines: Sequence[EngineMeasure] = (),
    ) -> None:
        self.reports.append((phase, step, dict(values)))

    def dropped(self) -> AsyncIterator[GroupDropped]:
        return aiter(self._drops)

    def _of(self, step: int, purpose: Purpose) -> list[int]:
        entries = self._open.items()
        return [number for number, entry in entries if (entry.group.step, entry.group.purpose) == (step, purpose)]

    def _pick(self, step: int, purpose: Purpose, min_samples: int, max_samples: int) -> list[int] | None:
        of_step = self._of(step, purpose)
        picked: list[int] = []
        samples = 0
        for number in (number for number in self._complete if number in of_step):
            size = self._open[number].group.n
            if samples + size > max_samples:
                return picked
            picked.append(number)
            samples += size
            # A fleet's groups trickle in: whatever is ready beyond the minimum, sometimes only that is given.
            if samples >= min_samples and self._random.random() < 0.5:
                return picked
        exhausted = len(picked) == len(of_step)
        return picked if samples >= min_samples or exhausted else None

    def _drop(self, number: int, reason: DiscardReason, detail: str, *, notify: bool = True) -> None:
        entry = self._open.pop(number, None)
        if entry is None:
            return
        self._complete = [group for group in self._complete if group != number]
        self.discarded[number] = reason
        dropped = GroupDropped(number, entry.group.step, purpose=entry.group.purpose, reason=reason, detail=detail)
        if notify:
            self._drops.put_once(number, dropped)
        self._changed.set()

    def _end_turn(self, group: Group, index: int) -> None:
        entry = self._open.get(group.id)
        if entry is None:
            return
        response = entry.responses.setdefault(index, [])
        new = self._write(group, index, list(response))
        response += new
        entry.masks.setdefault(index, []).extend([1] * len(new))
        entry.turns.setdefault(index, 0)
        self._ask(entry, index)

    def _ask(self, entry: _Open, index: int) -> None:
        group, done = entry.group, self._response(entry, index)
        turn = TurnDone(group.id, index, purpose=group.purpose, step=group.step, response=done)
        for nth in range(1 + (self._random.random() < 0.1)):  # Repeated until answered, says the contract.
            self._turns.put_once((turn.response.sample, turn.response.turn, nth), turn)

    def _response(self, entry: _Open, index: int) -> Response:
        ids, mask = entry.responses[index], np.asarray(entry.masks[index], dtype=np.uint8)
        spans = _spans(entry.masks[index], entry.version)
        log_probs = (mask * LOG_PROB).astype("<f4").tobytes()
        name = sample_id(entry.group.id, index)
        stop = ids[-1:] == list(entry.group.sampling.stop_token_ids)[:1]
        finish = Finish.STOP if stop else Finish.LENGTH
        return Response(
            name,
            pack_ids(ids),
            logprobs=log_probs,
            loss_mask=mask.tobytes(),
            spans=spans,
            turn=entry.turns[index],
            finish=finish,
        )


def _spans(mask: list[int], version: int) -> tuple[Span, ...]:
    """One per turn, and one of version -1 per text of the environment."""
    spans, start = [], 0
    for generated, positions in itertools.groupby(mask):
        end = start + len(list(positions))
        spans.append(
            Span(start, end, version=version, engine="fake", attempt=0)
            if generated
            else Span(start, end, version=-1, engine="", attempt=0)
        )
        start = end
    return tuple(spans)
