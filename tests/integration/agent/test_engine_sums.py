"""Engines that say what they hold, under the real manager: who holds something else never serves, and is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from polyrl.sample import Pool
from polyrl.weights.engine_sums import SAME_WEIGHTS, EngineSum
from polyrl.wire import Fenced
from polyrl_operator.secret import engine_keys
from polyrl_rollout.agent.app import EXIT_FAILED, Agent
from polyrl_rollout.agent.conversation import AgentSettings
from polyrl_rollout.engines.port import LoadSeconds
from polyrl_rollout.testing.fake_engine import FakeEngine
from polyrl_rollout.weights.staging import Staging
from tests.integration.agent.test_agent_processes import DEADLINE_S, EPOCH, GROUPS, SAMPLES, Site, open_site

pytestmark = pytest.mark.asyncio


class SummedEngine(FakeEngine):
    """Gives one sum after the other, by version."""

    def __init__(self, *sums: str) -> None:
        super().__init__()
        self._sums = list(sums)
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.closed = False

    async def load_weights(self, version: int, folder: Path) -> LoadSeconds:
        await self.may_load.wait()
        given = EngineSum("fake", self._sums[version].encode(), exact=True)
        await super().load_weights(version, folder)
        return LoadSeconds(wait=0.0, load=0.1, verify=0.1, sum=given)

    async def close(self) -> None:
        self.closed = True
        await super().close()


class Fleet:
    """Agents in this process."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site, self._folder = site, folder
        self.engines: dict[str, FakeEngine] = {}
        self.agents: dict[str, asyncio.Task[int]] = {}

    def start(self, name: str, *sums: str, epoch: int = EPOCH) -> FakeEngine:
        engine = self.engines[name] = SummedEngine(*sums) if sums else FakeEngine()
        settings = AgentSettings(
            lambda: self.site.manager.endpoints.agents,
            engine_keys(self.site.keys, name),
            run_epoch=epoch,
            engine=name,
            pool=Pool.SPOT,
            drain_s=3.0,
            seed=0,
        )
        agent = Agent(settings, engine, engine.capacity, Staging("sums", name, self._folder))
        self.agents[name] = asyncio.create_task(agent.run())
        return engine

    async def publish(self, version: int, value: float, config: bytes = b"{}") -> None:
        tensors, files = {"w": torch.full((1000,), value)}, {"config.json": config}
        published = await asyncio.to_thread(self.site.publisher.publish, version, tensors.items(), files)
        await self.site.client.publish(published)

    async def ended(self, name: str) -> int:
        async with asyncio.timeout(DEADLINE_S):
            return await self.agents[name]

    async def until(self, *names: str, version: int = 0) -> None:
        """These serve it, and no others do."""
        async with asyncio.timeout(DEADLINE_S):
            while self._serving(version) != sorted(names):  # noqa: ASYNC110 - the status has no event of its own
                await asyncio.sleep(0.02)

    def _serving(self, version: int) -> list[str]:
        return sorted(one.name for one in self.site.manager.status().engines if one.weight_version == version)

    def noted(self, kind: str = "condition") -> list[str]:
        history = self.site.manager._history.since(0.0, 0.0)
        return [event.text for event in history.events if event.kind == kind]

    async def close(self) -> None:
        for agent in self.agents.values():
            agent.cancel()
        await asyncio.gather(*self.agents.values(), return_exceptions=True)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with open_site(tmp_path) as site:
        fleet = Fleet(site, tmp_path)
        yield fleet
        await fleet.close()


async def test_one_that_holds_something_else_serves_nothing_and_its_successor_does(fleet: Fleet) -> None:
    await fleet.site.publish(0)
    fleet.start("a", "right")
    fleet.start("silent")
    await fleet.until("a", "silent")
    fleet.start("b", "wrong")
    assert await fleet.ended("b") == EXIT_FAILED
    assert fleet.engines["b"].closed
    await fleet.until("a", "silent")
    assert sorted(fleet.noted("serving")) == ["a serves", "silent serves"]
    assert fleet.noted() == [
        f"b is refused: it has loaded version 0, and adds it up to {b'wrong'.hex()}, not to {b'right'.hex()}"
        " as others of its kind (fake)"
    ]
    fleet.start("b2", "right")
    await fleet.until("a", "b2", "silent")
    assert fleet.site.manager._sums.outcomes == {"first": 1, "equal": 1, "incomparable": 0, "refused": 1}


async def test_a_first_one_that_two_others_contradict_is_refused_while_it_serves(fleet: Fleet) -> None:
    await fleet.site.publish(0)
    fleet.start("a", "wrong")
    await fleet.until("a")
    training = asyncio.create_task(fleet.site.train())
    fleet.start("b", "right")
    other = fleet.start("c", "right")
    assert isinstance(other, SummedEngine)
    other.may_load.clear()
    assert await fleet.ended("b") == EXIT_FAILED
    other.may_load.set()
    assert await fleet.ended("a") == EXIT_FAILED
    await fleet.until("c")
    assert len(await training) == GROUPS * SAMPLES, "its samples have moved"


async def test_a_load_that_changed_nothing_is_found_without_any_other(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    await fleet.site.publish(0)
    fleet.start("a", "same", "same")
    await fleet.until("a")
    await fleet.publish(1, 0.1)
    assert await fleet.ended("a") == EXIT_FAILED
    await fleet.until(version=1)
    fleet.start("a2", "-", "new")
    await fleet.until("a2", version=1)
    assert fleet.noted() == ["a is refused: it has loaded version 1, and holds what it held of version 0"]
    assert SAME_WEIGHTS in capsys.readouterr().out


async def test_a_version_with_other_files_alone_is_served_by_all(fleet: Fleet) -> None:
    for name in "ab":
        fleet.start(name, "same", "same")
    for version, file in enumerate((b"{}", b'{"eos_token_id": 1}')):
        await fleet.publish(version, 1.0, file)
        await fleet.until("a", "b", version=version)
    assert fleet.noted() == []


async def test_one_that_is_not_taken_does_not_count_as_there(fleet: Fleet) -> None:
    """Nothing says when it ends, and its follower would be a second one beside it."""
    await fleet.site.publish(0)
    fleet.start("a", "right")
    fleet.start("b", "right", epoch=EPOCH - 1)
    await fleet.ended("b")
    await fleet.until("a")
    assert set(fleet.site.manager._sums.sums._lives) == {"a"}


async def test_what_was_refused_while_nobody_listened_is_refused_at_the_next_greeting(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal may be lost with the connection, and its manager with all it knew."""
    await fleet.site.publish(0)
    fleet.start("a", "right")
    fleet.start("c", "right")
    await fleet.until("a", "c")
    manager = fleet.site.manager
    monkeypatch.setattr(manager._sums, "admits", lambda engine, message: True)
    fleet.start("b", "wrong")
    await fleet.until("a", "b", "c")
    monkeypatch.undo()
    manager._agents.send("b", Fenced("as after a lease", lease_over=True))
    assert await fleet.ended("b") == EXIT_FAILED
    await fleet.until("a", "c")
