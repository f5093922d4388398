"""Agents as processes under the real manager and ledger: killed and preempted mid-stream, exact to the token."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from aiohttp import web

from polyrl import parent_death_signal
from polyrl.keys import ManagerKeys, read_keys
from polyrl.ledger import Ledger, LedgerConfig
from polyrl.partition_signals import HEAL, PARTITION, PARTITION_IN, PARTITION_OUT
from polyrl.sample import Group, Purpose, SamplingParams, Scored
from polyrl.testing.started import StartedProcess
from polyrl.wire import pack_ids, unpack_ids
from polyrl_operator.secret import write_engine_keys, write_run_keys
from polyrl_rollout.manager.server import Listen, Manager
from polyrl_rollout.metadata import CLOUDS, MetadataWatcher, TerminationNotice
from polyrl_rollout.testing.fake_engine import continuation
from polyrl_rollout.testing.fake_metadata import FakeMetadata
from polyrl_rollout.weights.staging import default_base
from polyrl_trainer.client import RolloutClient
from polyrl_trainer.weights.publisher import WeightPublisher

EPOCH = 5
DEADLINE_S = 60.0
GROUPS, SAMPLES, TOKENS = 6, 4, 200
LEASE_S = 6.0
"""An agent whose process is starved for a moment is not a lost one."""
NOTICE_S = 9.0
"""Longer than a drain takes here, and unlike any default."""
SPEED = 100.0
"""Tokens per second of a sequence: each takes two seconds, so that kills fall into the middle."""


class Site:
    """Manager, trainer's client and publisher in this process; agents in their own."""

    def __init__(self, keys: Path, manager: Manager, client: RolloutClient, publisher: WeightPublisher) -> None:
        self.keys, self.manager, self.client, self.publisher = keys, manager, client, publisher
        self.agents: dict[str, StartedProcess] = {}

    async def start_agent(self, name: str, *more: str) -> None:
        script = (sys.executable, "-m", "polyrl.testing.script", Path(__file__).with_name("agent_on_fake_engine.py"))
        keys = self.keys / f"{name}.key"
        if name not in self.agents:
            await asyncio.to_thread(write_engine_keys, self.keys, name)
        argv = (*script, keys, self.manager.endpoints.agents, str(EPOCH), name, str(SPEED), *more)
        env = {**os.environ, parent_death_signal.PARENT_PID: str(os.getpid())}
        self.agents[name] = await asyncio.to_thread(StartedProcess, argv, env=env)

    async def publish(self, version: int) -> None:
        tensors = {"w": torch.full((1000,), float(version))}
        published = await asyncio.to_thread(self.publisher.publish, version, tensors.items(), {"config.json": b"{}"})
        await self.client.publish(published)

    def serving(self) -> list[str]:
        return [engine.name for engine in self.manager.status().engines if engine.weight_version >= 0]

    async def until_serving(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.serving()) < count:  # noqa: ASYNC110 - the status has no event of its own
                await asyncio.sleep(0.02)

    async def until_only(self, name: str) -> None:
        """Until every other agent is known to be gone."""
        async with asyncio.timeout(DEADLINE_S):
            while self.serving() != [name]:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.02)

    async def train(self) -> list[Scored]:
        """One step: all groups submitted, scored and packed."""
        await self.client.submit([group(number) for number in range(GROUPS)])
        scored: list[Scored] = []
        judge = asyncio.create_task(self._judge())
        try:
            while len(scored) < GROUPS * SAMPLES:
                batch = await self.client.next(
                    0, purpose=Purpose.TRAIN, min_samples=1, max_samples=999, max_tokens=10**6, deadline_s=DEADLINE_S
                )
                scored += batch.samples
                await self.client.acknowledge(batch.number)
        finally:
            judge.cancel()
            await asyncio.gather(judge, return_exceptions=True)
        return scored

    async def _judge(self) -> None:
        async for turn in self.client.turns():
            await self.client.score(turn.response.sample, turn.response.turn, 1.0, {})


async def ended(agent: StartedProcess) -> int:
    """Its exit code."""
    return await asyncio.to_thread(agent.wait, DEADLINE_S)


@asynccontextmanager
async def open_site(folder: Path) -> AsyncIterator[Site]:
    keys = folder / "keys"
    write_run_keys(keys)
    ledger = Ledger(LedgerConfig(run_epoch=EPOCH, lease_s=LEASE_S, lost_s=2 * LEASE_S))
    publisher = WeightPublisher(keys / "trainer.key", run_epoch=EPOCH)
    async with Manager(ledger, read_keys(ManagerKeys, keys / "manager.key"), EPOCH, Listen()) as manager:
        running = asyncio.create_task(manager.run())
        async with RolloutClient.connect(manager.endpoints.trainer, keys / "trainer.key", run_epoch=EPOCH) as client:
            site = Site(keys, manager, client, publisher)
            try:
                yield site
            finally:
                for agent in site.agents.values():
                    agent.kill()
                    await ended(agent)
        manager.stop()
        await running
    await asyncio.to_thread(publisher.close)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with open_site(tmp_path) as site:
        yield site


def group(number: int) -> Group:
    return Group(
        number,
        0,
        purpose=Purpose.TRAIN,
        prompt_ids=pack_ids(prompt(number)),
        n=SAMPLES,
        sampling=SamplingParams(TOKENS),
        min_version=0,
        max_version=0,
    )


def prompt(number: int) -> list[int]:
    return [7, 7, number]


def check_exact(scored: list[Scored]) -> None:
    """Each sample once, each token what an undisturbed engine gives, each with its logprob, version and maker."""
    assert sorted((s.group, s.index) for s in scored) == [(g, i) for g in range(GROUPS) for i in range(SAMPLES)]
    for sample in scored:
        response = sample.response
        assert unpack_ids(response.ids).tolist() == continuation(prompt(sample.group), TOKENS)
        assert np.all(np.frombuffer(response.logprobs, "<f4") == -0.5)
        assert all(span.version == 0 for span in response.spans)
        assert [span.start for span in response.spans[1:]] == [span.end for span in response.spans[:-1]]


async def test_agents_killed_and_preempted_mid_stream_cost_no_token(site: Site) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    moment = random.Random(seed).uniform(0.3, 1.2)
    await site.publish(0)
    for name in ("killed", "preempted", "stays"):
        await site.start_agent(name)
    await site.until_serving(3)
    training = asyncio.create_task(site.train())
    await asyncio.sleep(moment)  # the kill falls at a random moment, not at an event
    site.agents["killed"].kill()
    site.agents["preempted"].send_signal(signal.SIGTERM)
    assert await ended(site.agents["preempted"]) == 0
    scored = await asyncio.wait_for(training, DEADLINE_S)
    check_exact(scored)
    makers = {span.engine for sample in scored for span in sample.response.spans}
    assert "stays" in makers
    assert makers <= {"killed", "preempted", "stays"}
    print("makers", makers, "moved", sum(len(sample.response.spans) > 1 for sample in scored))
    status = site.manager.status()
    assert status.samples.acknowledged == GROUPS * SAMPLES
    await site.until_only("stays")


@pytest.mark.parametrize("partition", [PARTITION, PARTITION_IN, PARTITION_OUT], ids=["both", "in", "out"])
async def test_an_agent_cut_off_in_any_direction_is_found_and_costs_no_token(site: Site, partition: int) -> None:
    """Whatever is lost, its lease ends; work that it never heard of, or whose tokens never came, goes on elsewhere."""
    await site.publish(0)
    for name in ("cut", "stays"):
        await site.start_agent(name)
    await site.until_serving(2)
    site.agents["cut"].send_signal(partition)
    check_exact(await asyncio.wait_for(site.train(), DEADLINE_S))
    await site.until_only("stays")
    assert site.manager.status().engines_lost == 1
    site.agents["cut"].send_signal(HEAL)
    await site.until_serving(2)


@pytest.mark.parametrize("partition", [PARTITION, PARTITION_IN, PARTITION_OUT], ids=["both", "in", "out"])
async def test_a_cut_that_an_agent_slept_through_is_over_when_it_wakes(site: Site, partition: int) -> None:
    await site.publish(0)
    await site.start_agent("alone")
    await site.until_serving(1)
    for number in (signal.SIGSTOP, partition, HEAL, signal.SIGCONT):
        site.agents["alone"].send_signal(number)
    check_exact(await asyncio.wait_for(site.train(), DEADLINE_S))


@pytest.fixture
async def metadata() -> AsyncIterator[tuple[FakeMetadata, str]]:
    served = FakeMetadata()
    runner = web.AppRunner(served.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield served, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.mark.parametrize("preset", ["Karpenter", "GKE", "AKS"])
async def test_a_notice_in_the_clouds_metadata_costs_no_token(
    site: Site, metadata: tuple[FakeMetadata, str], preset: str
) -> None:
    cloud, url = metadata
    await site.publish(0)
    await site.start_agent("noticed", preset, url)
    await site.start_agent("stays")
    await site.until_serving(2)
    training = asyncio.create_task(site.train())
    await asyncio.sleep(0.5)  # in mid-stream
    assert site.agents["noticed"].poll() is None
    cloud.take_away(NOTICE_S)
    assert await ended(site.agents["noticed"]) == 0
    check_exact(await asyncio.wait_for(training, DEADLINE_S))
    status = site.manager.status()
    assert status.engines_lost == 0, "it said goodbye"
    assert status.tokens.regenerated == 0
    assert len(cloud.asked) >= 2


async def test_metadata_that_does_not_answer_is_asked_again_and_changes_nothing(
    metadata: tuple[FakeMetadata, str],
) -> None:
    cloud, url = metadata
    notices: list[TerminationNotice] = []
    deaf = MetadataWatcher(CLOUDS["GKE"](), "http://127.0.0.1:1", notices.append, away_s=0.01)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(deaf.run(), 0.3)
    assert notices == []
    begun = time.monotonic()
    cloud.take_away(NOTICE_S)
    await asyncio.wait_for(MetadataWatcher(CLOUDS["EKSManaged"](), url, notices.append).run(), DEADLINE_S)
    assert len(notices) == 1
    passed = time.monotonic() - begun
    assert NOTICE_S - 1 - passed <= notices[0].seconds <= NOTICE_S, "AWS says it in whole seconds"


async def test_an_agent_that_is_started_again_under_its_name_costs_no_token(site: Site) -> None:
    """A container that restarts in place: the pod, and so the name, stays."""
    await site.publish(0)
    for name in ("restarts", "stays"):
        await site.start_agent(name)
    await site.until_serving(2)
    training = asyncio.create_task(site.train())
    for _ in range(2):
        await asyncio.sleep(0.5)  # in mid-stream
        site.agents["restarts"].kill()
        await ended(site.agents["restarts"])
        await site.start_agent("restarts")
    check_exact(await asyncio.wait_for(training, DEADLINE_S))
    assert site.manager.status().samples.acknowledged == GROUPS * SAMPLES
    await site.until_serving(2)


async def test_agents_drain_and_leave_nothing_when_the_run_is_over(site: Site) -> None:
    await site.publish(0)
    for name in ("one", "two"):
        await site.start_agent(name)
    await site.until_serving(2)
    await site.publish(1)
    async with asyncio.timeout(DEADLINE_S):
        while {e.weight_version for e in site.manager.status().engines} != {1}:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)
    await site.client.finish(True, "done")
    for agent in site.agents.values():
        assert await ended(agent) == 0
    assert not list(default_base().glob("polyrl-agent-processes-*"))
