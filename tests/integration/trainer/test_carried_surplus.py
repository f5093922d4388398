"""overSamplingFactor at maxStaleness above 0: what a step leaves over trains in the next one, however long it is."""

from __future__ import annotations

import asyncio
import heapq
import json
import random
from math import ceil

import pytest

from polyrl.errors import RunFailed
from polyrl.sample import DiscardReason, group_digest
from polyrl_trainer.checkpoints import latest, read_checkpoint
from polyrl_trainer.data.tokenizers import EOS_ID
from tests.integration.trainer.loop_run import Run, recipe
from tests.integration.trainer.test_generation_ahead import Watched

TURNS_OF_THE_LOOP = 40
"""In which a verdict reaches the rollouts."""


class Timed(Watched):
    """Takes as long for a sample as it has tokens, all at once; time passes while the learner waits."""

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.now = 0
        self.running = []

    def _end_turn(self, group, index):
        entry = self._open.get(group.id)
        if entry is None:
            return
        entry.responses[index] = self._write(group, index, [])
        entry.masks[index], entry.turns[index] = [1] * len(entry.responses[index]), 0
        heapq.heappush(self.running, (self.now + len(entry.responses[index]), group.id, index))

    async def next(self, step, **asked):
        pulled = asyncio.ensure_future(super().next(step, **asked))
        while not pulled.done():
            for _ in range(TURNS_OF_THE_LOOP):
                await asyncio.sleep(0)
            if not pulled.done() and self.running:
                self.now, number, index = heapq.heappop(self.running)
                if number in self._open:
                    self._ask(self._open[number], index)
        return await pulled


def long_tailed(group, index, so_far):
    """Pareto with exponent 1.5; the same for a prompt whenever it is drawn."""
    draw = random.Random(f"{group.prompt_ids!r}/{index}").paretovariate(1.5)
    return [4] * min(28, int(2 * draw)) + [EOS_ID]


def written(run, numbers):
    groups = {group.id: group for group in run.rollouts.submitted}
    lengths = [len(long_tailed(groups[number], index, [])) for number in numbers for index in range(3)]
    return sum(lengths) / len(lengths)


async def over_sampled(folder, k, *, steps=12, factor=1.5, resume=None, rollouts=None):
    spec = recipe(steps=steps, max_staleness=k, over_sampling_factor=factor)
    run = Run.make(folder, rollouts or Timed(long_tailed), spec, resume=resume)
    assert await run.train(spec)
    return run


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("k", "factor"), [(1, 1.1), (1, 1.25), (1, 1.5), (1, 2.0), (2, 1.5), (3, 2.0)])
async def test_all_that_was_drawn_trains_within_a_step_and_within_the_bound(tmp_path, k, factor):
    steps = 12
    run = await over_sampled(tmp_path, k, steps=steps, factor=factor)
    wanted = ceil(4 * factor)
    surplus = [number for number, reason in run.rollouts.discarded.items() if reason is DiscardReason.SURPLUS]
    by_id = {group.id: group for group in run.rollouts.submitted}
    assert {by_id[number].step for number in surplus} == {steps}, "only the end of the run cancels"
    assert len(run.rollouts.submitted) == steps * 4 + wanted - 4
    trained = {number for _, number, _ in run.rollouts.trained}
    assert written(run, trained) == pytest.approx(written(run, by_id), rel=0.03), "no answer is too long to train"
    assert run.rollouts.most_open <= 4 * k + wanted - 4
    lines = lines_of(tmp_path)
    assert [line["rollout/carried_groups"] for line in lines] == [0.0] + [wanted - 4.0] * (steps - 1)
    assert max(line["rollout/staleness_max"] for line in lines) == k
    assert all(line["rollout/untrained_share"] == 0.0 for line in lines[:-1])
    assert [line["weights/version"] for line in lines] == list(range(steps))
    assert run.rollouts.published == list(range(steps))


async def test_without_staleness_the_longest_are_cancelled(tmp_path):
    """What `overSamplingFactor` costs at maxStaleness 0, as the pages say."""
    run = await over_sampled(tmp_path, 0)
    trained = {number for _, number, _ in run.rollouts.trained}
    assert written(run, trained) < 0.9 * written(run, {group.id for group in run.rollouts.submitted})
    assert all(line["rollout/staleness_max"] == 0.0 for line in lines_of(tmp_path))


@pytest.mark.parametrize("k", [1, 2])
async def test_a_resumed_run_trains_what_was_carried_first(tmp_path, k):
    """Under the step that it was submitted for, so that what the manager holds of it is of use."""
    whole = Timed(long_tailed, breaks_at=4)
    with pytest.raises(RunFailed):
        await over_sampled(tmp_path / "cut", k, rollouts=whole)
    state = read_checkpoint(latest(tmp_path / "cut"))
    assert (state.step, state.carried) == (3, 2)
    left = {group.id: group for group in whole.submitted if group.step == 3}
    left = [group for number, group in left.items() if number not in {one for _, one, _ in whole.trained}]
    spec = recipe(steps=6, max_staleness=k, over_sampling_factor=1.5)
    run = Run.make(tmp_path / "next", Timed(long_tailed), spec, resume=latest(tmp_path / "cut"))
    run.rollouts.published.append(2)
    assert await run.train(spec)
    again = [group for group in run.rollouts.submitted if group.step == 3]
    assert [group_digest(group) for group in again] == [group_digest(group) for group in left]
    assert {group.id for group in again} <= {number for _, number, _ in run.rollouts.trained}
    uncut = await over_sampled(tmp_path / "uncut", k)
    after = [group.prompt_ids for group in uncut.rollouts.submitted if group.step >= 4]
    asked = [group.prompt_ids for group in run.rollouts.submitted]
    assert asked == ([group.prompt_ids for group in left] + after)[: len(asked)]


@pytest.mark.parametrize(
    ("own_lost", "submitted"),
    [pytest.param(0, (6, 4, 6), id="there is surplus"), pytest.param(1, (6, 5, 6), id="replaced where it would train")],
)
async def test_a_carried_group_that_is_lost(tmp_path, own_lost, submitted):
    class Losing(Timed):
        async def submit(self, groups):
            await super().submit(groups)
            if groups[0].step == 2 and len(groups) > 1:
                carried = [number for number, one in self._open.items() if one.group.step == 1]
                for number in [*(group.id for group in groups[:own_lost]), *carried]:
                    self._drop(number, DiscardReason.ENGINE_REJECTED, "gone")

    run = await over_sampled(tmp_path, 1, steps=3, rollouts=Losing(long_tailed))
    steps = [group.step for group in run.rollouts.submitted]
    assert (steps.count(1), steps.count(2), steps.count(3)) == submitted
    assert run.session.state.results.dropped_groups == {"engineRejected": 2 + own_lost}
    assert [line["rollout/samples"] for line in lines_of(tmp_path)] == [12.0] * 3


@pytest.mark.parametrize("when", ["as it is submitted", "as the step's own are"])
async def test_a_carried_group_that_is_lost_as_a_resumed_run_begins_is_replaced(tmp_path, when):
    """What the manager holds may be dropped as soon as its turns have somebody who answers them."""

    class Losing(Timed):
        async def submit(self, groups):
            await super().submit(groups)
            carried = [number for number, one in self._open.items() if one.group.step == 3]
            if groups[0].step == (3 if when == "as it is submitted" else 4) and len(carried) == 2:
                for number in carried:
                    self._drop(number, DiscardReason.REWARD_RAISED, "it raised")
                await asyncio.sleep(0.05)

    with pytest.raises(RunFailed):
        await over_sampled(tmp_path / "cut", 1, rollouts=Timed(long_tailed, breaks_at=4))
    spec = recipe(steps=6, max_staleness=1, over_sampling_factor=1.5)
    run = Run.make(tmp_path / "next", Losing(long_tailed), spec, resume=latest(tmp_path / "cut"))
    run.rollouts.published.append(2)
    assert await run.train(spec)
    assert run.session.state.results.dropped_groups["rewardRaised"] == 2
    assert [line["rollout/samples"] for line in lines_of(tmp_path / "next")] == [12.0] * 3
