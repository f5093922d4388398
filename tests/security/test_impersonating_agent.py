"""A compromised rollout speaks for itself alone: with the agents' key, its own proof and a victim's name, on real
sockets, it is refused, reads nothing, and the victim's samples stay the victim's.

Before engines had proofs, with a victim's name 16 running samples went on in its name, all waiting prompts were read,
and 8 of 8 samples of the next batch were forged.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq.asyncio

from polyrl.keys import AgentKeys, ManagerKeys, read_keys
from polyrl.ledger import Ledger, LedgerConfig
from polyrl.sample import Group, Pool, Purpose, SamplingParams
from polyrl.weights import WeightsRef
from polyrl.wire import Hello, pack_ids, unpack_ids
from polyrl.wire.engine_identity import UNPROVEN, engine_keys
from polyrl_operator.secret import write_run_keys
from polyrl_rollout.agent.app import Agent
from polyrl_rollout.agent.conversation import AgentSettings
from polyrl_rollout.manager import server
from polyrl_rollout.manager.server import Listen, Manager
from polyrl_rollout.testing.fake_agent import FakeAgent, made_tokens
from polyrl_rollout.testing.fake_engine import FakeEngine
from polyrl_rollout.weights.staging import Staging
from polyrl_trainer.client import RolloutClient

EPOCH, SAMPLES, TOKENS, DEADLINE_S = 1, 8, 120, 30.0
GREETINGS = 2
PACE = 100.0
"""Tokens per second: samples run for a second, and the thief comes in their midst."""


def settings_of(endpoint: str, keys: AgentKeys) -> AgentSettings:
    return AgentSettings(lambda: endpoint, keys, run_epoch=EPOCH, engine="victim", pool=Pool.SPOT, drain_s=1.0, seed=0)


async def impersonate(endpoint: str, keys: AgentKeys, folder: Path, capsys: Any) -> None:
    """The real agent, under the victim's name and with its own key file."""
    engine = FakeEngine()
    staging = Staging("thief", "victim", folder)
    agent = Agent(settings_of(endpoint, keys), engine, engine.capacity, staging)
    assert await asyncio.wait_for(agent.run(), DEADLINE_S) == 1
    staging.close()
    assert UNPROVEN in capsys.readouterr().out
    assert engine.version == -1, "it was offered no weights and no work"


async def impersonate_by_copy(manager: Manager, keys: AgentKeys, folder: Path) -> None:
    """The real agent with a copy of the victim's own key file."""
    engine, staging = FakeEngine(), Staging("thief", "victim", folder)
    agent = Agent(settings_of(manager.endpoints.agents, keys), engine, engine.capacity, staging)
    dropped = manager.traffic["agents"].dropped
    run = asyncio.create_task(agent.run())
    while dropped["double"] < GREETINGS:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.01)
    assert any(wait.startswith("another process with the proof of victim waits") for wait in manager.waits())
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    staging.close()
    assert engine.version == -1, "it was offered no weights and no work"


@pytest.mark.parametrize(
    "thief", ["thief", "", "victim"], ids=["with its own proof", "with none", "with a copy of the victim's"]
)
async def test_an_agent_under_anothers_name_is_refused_and_the_victim_goes_on(
    tmp_path: Path, thief: str, capsys: Any
) -> None:
    write_run_keys(tmp_path)
    ledger, context = Ledger(LedgerConfig(run_epoch=EPOCH, lease_s=5.0, lost_s=5.0)), zmq.asyncio.Context()
    stolen = engine_keys(tmp_path, thief) if thief else read_keys(AgentKeys, tmp_path / "agent.key")
    hello = Hello(EPOCH, "victim", Pool.SPOT, max_running=8, kv_tokens=10_000, max_context=1_000, weight_version=-1)
    own = read_keys(ManagerKeys, tmp_path / "manager.key")
    async with asyncio.timeout(DEADLINE_S), Manager(ledger, own, EPOCH, Listen()) as manager:
        endpoint = manager.endpoints.agents
        victim = FakeAgent(context, endpoint, engine_keys(tmp_path, "victim"), hello, tokens_per_s=PACE)
        tasks = [asyncio.create_task(manager.run()), asyncio.create_task(victim.run())]
        async with RolloutClient.connect(manager.endpoints.trainer, tmp_path / "trainer.key", EPOCH) as client:
            await client.publish(WeightsRef(0, "tcp://127.0.0.1:1", public_key="k" * 40, manifest_hash=b"hash"))
            asked = {"n": SAMPLES, "sampling": SamplingParams(TOKENS), "min_version": 0, "max_version": 0}
            await client.submit([Group(0, 0, Purpose.TRAIN, pack_ids([1]), **asked)])  # type: ignore[arg-type]
            while not victim.tokens_made:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
            if thief == "victim":
                await impersonate_by_copy(manager, stolen, tmp_path)
            else:
                await impersonate(endpoint, stolen, tmp_path, capsys)
            assert victim.tokens_made < SAMPLES * TOKENS, "they were running"
            turns = client.turns()
            done = [await anext(turns) for _ in range(SAMPLES)]
        status = manager.status()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    context.destroy(linger=0)
    for turn in done:
        ids = unpack_ids(turn.response.ids)
        assert ids.tolist() == made_tokens(turn.response.sample, 0, len(ids)).tolist()
        assert {span.engine for span in turn.response.spans} == {"victim"}
    assert len(victim.assigned) == SAMPLES, "none was moved, and none begun again"
    assert status.engines_lost == 0
    assert status.tokens.generated == SAMPLES * TOKENS


PARTS = 200_000
LOOP_S = 1.0
"""The loop stood for a second per 200,000 parts before; shared cores included."""


async def test_a_message_of_many_parts_is_not_gathered(tmp_path: Path) -> None:
    write_run_keys(tmp_path)
    keys, context = engine_keys(tmp_path, "thief"), zmq.asyncio.Context()
    own = read_keys(ManagerKeys, tmp_path / "manager.key")
    ledger = Ledger(LedgerConfig(run_epoch=EPOCH))
    async with asyncio.timeout(DEADLINE_S), Manager(ledger, own, EPOCH, Listen()) as manager:
        task = asyncio.create_task(manager.run())
        hello = Hello(EPOCH, "thief", Pool.SPOT, max_running=1, kv_tokens=10, max_context=10, weight_version=-1)
        thief = FakeAgent(context, manager.endpoints.agents, keys, hello, tokens_per_s=PACE)
        await asyncio.to_thread(zmq.Socket(thief.socket).send_multipart, [b""] * PARTS)
        await thief.send(hello)
        longest = 0.0
        while "thief" not in ledger.state.engines:
            began = time.monotonic()
            await asyncio.sleep(0)
            longest = max(longest, time.monotonic() - began)
        dropped = manager.traffic["agents"].dropped
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    context.destroy(linger=0)
    assert dropped["parts"] == 1
    assert longest < LOOP_S


MIB = 1 << 20
ALLOWED = 16 * MIB
"""Of unfinished messages, in this test; 128 MiB in a run."""
ENDLESS_PARTS = 400
"""Of 1 MiB. All of them were kept before."""
GROWTH = 128 * MIB
"""Of the process in which the manager is: what was allowed, what comes between two checks, and what else it does."""


async def test_a_message_without_an_end_is_cut_off_and_the_others_work_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thief has the agents' key and no proof: nothing of it is ever handed over, and it fills the memory."""
    write_run_keys(tmp_path)
    monkeypatch.setattr(server, "MAX_UNFINISHED_BYTES", ALLOWED)
    context, own = zmq.asyncio.Context(), read_keys(ManagerKeys, tmp_path / "manager.key")
    hello = Hello(EPOCH, "honest", Pool.SPOT, max_running=8, kv_tokens=10_000, max_context=1_000, weight_version=-1)
    ledger, rss = Ledger(LedgerConfig(run_epoch=EPOCH)), psutil.Process().memory_info
    async with asyncio.timeout(DEADLINE_S), Manager(ledger, own, EPOCH, Listen()) as manager:
        endpoint, dropped = manager.endpoints.agents, manager.traffic["agents"].dropped
        honest = FakeAgent(context, endpoint, engine_keys(tmp_path, "honest"), hello, tokens_per_s=PACE)
        thief = FakeAgent(context, endpoint, read_keys(AgentKeys, tmp_path / "agent.key"), hello, tokens_per_s=PACE)
        tasks = [asyncio.create_task(manager.run()), asyncio.create_task(honest.run())]
        async with RolloutClient.connect(manager.endpoints.trainer, tmp_path / "trainer.key", EPOCH) as client:
            await client.publish(WeightsRef(0, "tcp://127.0.0.1:1", public_key="k" * 40, manifest_hash=b"hash"))
            asked = {"n": SAMPLES, "sampling": SamplingParams(TOKENS), "min_version": 0, "max_version": 0}
            await client.submit([Group(0, 0, Purpose.TRAIN, pack_ids([1]), **asked)])  # type: ignore[arg-type]
            before = highest = rss().rss
            parts = [bytes(MIB)] * ENDLESS_PARTS
            sent = asyncio.create_task(asyncio.to_thread(zmq.Socket(thief.socket).send_multipart, parts, copy=False))
            while not dropped["unfinished"]:
                highest = max(highest, rss().rss)
                await asyncio.sleep(0.005)
            turns = client.turns()
            done = [await anext(turns) for _ in range(SAMPLES)]
        await sent
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    context.destroy(linger=0)
    assert highest - before < GROWTH
    assert {len(unpack_ids(turn.response.ids)) for turn in done} == {TOKENS}
    assert len(honest.assigned) == SAMPLES, "it was not cut off"
