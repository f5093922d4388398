"""Streams of turns and of dropped groups: for whoever iterates, waits for one with a deadline, or polls."""

from __future__ import annotations

import asyncio

import pytest

from polyrl.errors import RunFailed
from polyrl_trainer.client.conversation import EventStream


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
