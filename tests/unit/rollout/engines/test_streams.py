"""Streams of one engine: each consumer its own chunks, and silence of the whole engine as the only time limit."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from polyrl.sample import Finish
from polyrl_rollout.engines.port import EngineFailed, TokenChunk
from polyrl_rollout.engines.streams import SilenceDeadline, Streams

DEADLINE_S = 0.05


def chunk(token: int, finish: Finish | None = None) -> TokenChunk:
    return TokenChunk([token], [-1.0], version=1, finish=finish)


def new_streams() -> Streams:
    return Streams(SilenceDeadline(asyncio.get_running_loop().time, DEADLINE_S))


async def drain(streams: Streams, rid: str) -> list[int]:
    return [token async for c in streams.chunks(rid) for token in c.ids]


async def test_each_consumer_gets_its_own_until_the_finish() -> None:
    streams = new_streams()
    for rid in ("a", "b"):
        streams.open(rid)
    for token in range(4):
        streams.deliver("ab"[token % 2], chunk(token, Finish.STOP if token > 1 else None))
    streams.deliver("nobody", chunk(9))
    assert await asyncio.gather(drain(streams, "a"), drain(streams, "b")) == [[0, 2], [1, 3]]
    streams.open("a")


async def test_a_running_rid_cannot_be_opened_again() -> None:
    streams = new_streams()
    streams.open("a")
    with pytest.raises(ValueError, match="already running"):
        streams.open("a")


async def test_ended_and_failed_streams() -> None:
    streams = new_streams()
    for rid in ("a", "b", "c"):
        streams.open(rid)
    tasks = [asyncio.create_task(drain(streams, rid)) for rid in ("a", "b", "c")]
    await asyncio.sleep(0)
    streams.end("a")
    streams.end("unknown")
    streams.fail_all("gone")
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[0] == []
    assert [str(error) for error in results[1:]] == ["gone", "gone"]


async def test_one_that_waits_its_turn_outlasts_the_deadline_while_others_are_served() -> None:
    """By a clock of the test's own: a machine that is busy elsewhere is no silence of the engine."""
    clock = count(0.0, DEADLINE_S / 2)
    now = [next(clock)]
    streams = Streams(SilenceDeadline(lambda: now[0], DEADLINE_S))
    streams.open("waiting")
    streams.open("busy")
    task = asyncio.create_task(drain(streams, "waiting"))
    for _ in range(6):
        await asyncio.sleep(DEADLINE_S / 2)
        now[0] = next(clock)
        streams.deliver("busy", chunk(1))
    streams.deliver("waiting", chunk(2, Finish.LENGTH))
    assert await task == [2]


async def test_silence_towards_all_is_a_failure() -> None:
    streams = new_streams()
    streams.open("a")
    with pytest.raises(EngineFailed, match="no token of a, nor anything else"):
        await drain(streams, "a")
