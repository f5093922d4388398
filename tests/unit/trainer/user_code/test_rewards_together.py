"""Samples that share a call: what waits goes together, a group waits for its last sample, a failed batch is divided."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from polyrl.manifest.parts.user_code import RewardSpec
from polyrl.sample import DiscardReason, split_sample_id
from polyrl_trainer.sample import Sample
from polyrl_trainer.user_code.pools import UserPools, reward_pool
from polyrl_trainer.user_code.together import Batches, Groups
from polyrl_trainer.user_code.verdicts import Reward, Unscored, Verdict, read_rewards

BAD = Unscored(DiscardReason.REWARD_RAISED, "bad")


class Judge:
    """Judges when it is let; one sample whose response is `bad` spoils its call."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.free = asyncio.Event()

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[Verdict]:
        self.calls.append([one.id for one in samples])
        await self.free.wait()
        if any(one.response == "bad" for one in samples):
            return [BAD] * len(samples)
        return [Reward(float(split_sample_id(one.id)[1])) for one in samples]


def sample(name: str, response: str = "") -> Sample:
    nothing = np.zeros(1, np.float32)
    group = split_sample_id(name)[0]
    return Sample(nothing.astype(np.int64), nothing, 1, id=name, group=group, response=response)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_waits_while_workers_are_busy_goes_together() -> None:
    judge = Judge()
    batches = Batches(judge, most=3, at_once=2)
    tasks = [asyncio.create_task(batches.verdict(sample(f"1.{n}"), 8)) for n in range(6)]
    await settled()
    assert sorted(map(len, judge.calls)) == [3, 3], "all were there before a call began"
    later = [asyncio.create_task(batches.verdict(sample(f"2.{n}"), 8)) for n in range(4)]
    await settled()
    assert len(judge.calls) == 2
    judge.free.set()
    assert await asyncio.gather(*tasks, *later) == [Reward(float(n)) for n in (*range(6), *range(4))]
    assert sorted(map(len, judge.calls[2:])) == [1, 3]


async def test_a_batch_of_which_none_has_a_reward_is_called_one_by_one() -> None:
    judge = Judge()
    judge.free.set()
    batches = Batches(judge, most=8, at_once=1)
    responses = ("", "bad", "")
    found = await asyncio.gather(*(batches.verdict(sample(f"1.{n}", one), 3) for n, one in enumerate(responses)))
    assert found == [Reward(0.0), BAD, Reward(2.0)]
    assert judge.calls == [["1.0", "1.1", "1.2"], ["1.0"], ["1.1"], ["1.2"]]


async def test_what_ends_the_run_reaches_whoever_waits() -> None:
    async def broken(samples: Sequence[Sample]) -> Sequence[Verdict]:
        raise RuntimeError("no worker")

    for together in (Batches(broken, most=8, at_once=1), Groups(broken)):
        calls = (together.verdict(sample(f"1.{n}"), 2) for n in range(2))
        assert all(isinstance(one, RuntimeError) for one in await asyncio.gather(*calls, return_exceptions=True))


async def test_a_group_is_called_once_in_order_with_its_last_sample() -> None:
    judge = Judge()
    judge.free.set()
    groups = Groups(judge)
    tasks = [asyncio.create_task(groups.verdict(sample(name), 3)) for name in ("1.2", "1.0", "2.0")]
    await settled()
    assert judge.calls == []
    assert await groups.verdict(sample("1.1"), 3) == Reward(1.0)
    assert await asyncio.gather(*tasks[:2]) == [Reward(2.0), Reward(0.0)]
    assert judge.calls == [["1.0", "1.1", "1.2"]]
    groups.forget(2)
    with pytest.raises(asyncio.CancelledError):
        await tasks[2]


async def test_what_waits_of_a_group_that_is_over_is_not_called() -> None:
    judge = Judge()
    batches = Batches(judge, most=1, at_once=1)
    first, *others = [asyncio.create_task(batches.verdict(sample(name), 1)) for name in ("1.0", "2.0", "3.0")]
    await settled()
    batches.forget(2)
    judge.free.set()
    assert [await first, await others[1]] == [Reward(0.0)] * 2
    assert others[0].cancelled()
    assert judge.calls == [["1.0"], ["3.0"]]


@pytest.mark.parametrize("returned", [None, 1.0, "12", {"reward": 1.0}, [1.0], [1.0, 2.0, 3.0]])
def test_anything_but_a_result_for_each_is_no_reward_for_any(returned: object) -> None:
    verdicts = read_rewards(returned, 2, function="score_batch")
    assert len(verdicts) == 2
    assert all(isinstance(one, Unscored) and one.reason is DiscardReason.REWARD_INVALID for one in verdicts)
    assert "score_batch must return a list with a result for each of its 2 samples, got" in str(verdicts)


def test_a_sets_own_reward_of_groups_leaves_half_scored_groups_useless_too() -> None:
    """Its verdicts leave by whole groups: half of one that an earlier trainer left would wait for the rest for ever."""
    one, of_groups = (reward_pool(RewardSpec(function=f"code:{name}"), Path()) for name in ("score", "score_group"))
    assert UserPools(one, {"hard": of_groups}, group_filter=None, environment=None).scores_groups
    assert not UserPools(one, {"hard": one}, group_filter=None, environment=None).scores_groups


def test_each_result_is_read_as_one() -> None:
    found = read_rewards(iter([np.float32(1), {"reward": 2, "exact": True}, float("nan")]), 3, function="f")
    assert found[:2] == [Reward(1.0), Reward(2.0, {"exact": 1.0})]
    assert isinstance(found[2], Unscored)
