"""Streams of turns and of dropped groups: for whoever iterates, waits for one with a deadline, or polls."""

from __future__ import annotations

import asyncio

import pytest

from polyrl.errors import DeadlineExceeded, RunFailed
from polyrl.sample import DiscardReason, Group, Purpose, SamplingParams
from polyrl.weights import WeightsRef
from polyrl.wire import GroupDropped, TurnDone, pack_ids
from polyrl_trainer.client.conversation import EventStream
from polyrl_trainer.testing.fake_rollouts import FakeRollouts


def test_a_wait_that_was_cancelled_ends_no_stream() -> None:
    """It looked like the end of the run, and what came next was lost to the loop."""

    async def poll() -> list[str]:
        stream = EventStream[str]()
        turns = aiter(stream)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(turns), timeout=0.01)
        stream.put_once(1, "a turn")
        stream.end()
        return [turn async for turn in turns]

    assert asyncio.run(poll()) == ["a turn"]


def test_everybody_who_iterates_hears_of_the_end() -> None:
    async def iterate() -> None:
        stream = EventStream[str]()
        readers = [asyncio.create_task(anext(aiter(stream))) for _ in range(2)]
        await asyncio.sleep(0)
        stream.end(RunFailed("the manager is gone"))
        for reader in readers:
            with pytest.raises(RunFailed):
                await reader

    asyncio.run(iterate())


@pytest.mark.parametrize("stream", ["turns", "dropped"])
def test_nor_does_it_end_the_double_that_loops_are_tested_with(stream: str) -> None:
    async def poll() -> int:
        rollouts = FakeRollouts(lambda group, index, response: [7])
        comes = getattr(rollouts, stream)()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(comes), timeout=0.01)
        await rollouts.publish(WeightsRef(0, "tcp://nobody"))
        sampling = SamplingParams(max_new_tokens=1)
        await rollouts.submit(
            [Group(3, 0, Purpose.TRAIN, pack_ids([1]), 1, sampling, min_version=0, max_version=0)],
        )
        if stream == "dropped":
            await rollouts.reject("3.0", DiscardReason.REWARD_RAISED, "said so")
        came: TurnDone | GroupDropped = await asyncio.wait_for(anext(comes), timeout=10)
        return came.group

    assert asyncio.run(poll()) == 3


async def test_nor_does_the_double_name_the_surplus_of_a_step_that_it_was_asked_to_end() -> None:
    """As the manager: whoever submits another for each drop would go on for ever."""
    rollouts = FakeRollouts(lambda group, index, response: [7])
    group = Group(3, 0, Purpose.TRAIN, pack_ids([1]), 1, SamplingParams(max_new_tokens=1), min_version=0, max_version=0)
    await rollouts.submit([group])
    await rollouts.end_step(0, Purpose.TRAIN)
    assert rollouts.discarded == {3: DiscardReason.SURPLUS}
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(rollouts.dropped()), timeout=0.01)


async def test_the_double_ends_a_wait_for_a_batch_as_the_client_does() -> None:
    rollouts = FakeRollouts(lambda group, index, response: [7])
    group = Group(3, 0, Purpose.TRAIN, pack_ids([1]), 1, SamplingParams(max_new_tokens=1), min_version=0, max_version=0)
    await rollouts.submit([group])
    with pytest.raises(DeadlineExceeded, match="a batch of step 0"):
        await rollouts.next(0, purpose=Purpose.TRAIN, min_samples=1, max_samples=1, max_tokens=9, deadline_s=0.01)
