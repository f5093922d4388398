"""Versions that are announced faster than they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from polyrl.weights import WeightsRef
from polyrl_rollout.engines.port import NO_VERSION
from polyrl_rollout.weights.puller import Pulled
from polyrl_rollout.weights.versions import Versions

STEP_S = 0.1
CHUNKS = 6
COME_S = 10.0


class Network:
    """Brings a version in so many steps, or nothing of those that hang."""

    def __init__(self, steps: float, hanging: range = range(0)) -> None:
        self.bytes_come, self._chunk_s, self._hanging = 0, steps * STEP_S / CHUNKS, hanging
        self.asked = list[int]()

    async def pull(self, weights: WeightsRef, _: object) -> Pulled:
        self.bytes_come = 0
        self.asked.append(weights.version)
        if weights.version in self._hanging:
            await asyncio.Event().wait()
        for _chunk in range(CHUNKS):
            await asyncio.sleep(self._chunk_s)
            self.bytes_come += 1
        return cast("Pulled", SimpleNamespace(staged=SimpleNamespace(version=weights.version, receipt=b"")))


@asynccontextmanager
async def announced(network: Network, number: int) -> AsyncIterator[list[int]]:
    """What the engine serves, one version after the other, when so many were announced, one in each step."""
    engine, served = SimpleNamespace(version=NO_VERSION), list[int]()

    async def switch(pulled: Pulled) -> str:
        engine.version = pulled.staged.version
        served.append(engine.version)
        return ""

    staging = SimpleNamespace(keep_only=lambda _: None)
    parts: Any = (engine, network, staging, switch, lambda _: None, lambda _: None)
    versions = Versions(*parts)
    running = asyncio.create_task(versions.run())
    for version in range(number):
        versions.announce(WeightsRef(version))
        await asyncio.sleep(STEP_S)
    yield served
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("steps", [1.6, 2.7])
async def test_an_engine_whose_link_is_slower_than_the_learner_serves_now_and_then(steps: float) -> None:
    """It served none, ever: each pull was given up for the next one."""
    async with announced(Network(steps), 16) as served:
        assert len(served) >= 3


async def test_a_pull_of_which_nothing_comes_is_superseded_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyrl_rollout.weights.versions.COMES_S", STEP_S / 10)
    network = Network(0.5, hanging=range(5))
    async with announced(network, 7) as served:
        assert network.asked[:5] == [0, 1, 2, 3, 4]
        async with asyncio.timeout(COME_S):
            while len(served) < 2:  # noqa: ASYNC110 - a crowded machine takes longer than its step
                await asyncio.sleep(STEP_S / 10)
        assert served == [5, 6]


async def test_the_newest_one_comes_at_once_where_the_link_is_fast_enough() -> None:
    async with announced(Network(0.2), 5) as served:
        assert served == [0, 1, 2, 3, 4]
