"""A cluster of IPv6 addresses: manager, agent, trainer and publisher find each other on ::1."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
import torch

from polyrl.control import bracketed, may_be_ipv6
from polyrl.keys import ManagerKeys, read_keys
from polyrl.ledger import Ledger, LedgerConfig
from polyrl.sample import Group, Pool, Purpose, SamplingParams
from polyrl.wire import pack_ids
from polyrl.wire.engine_identity import engine_keys
from polyrl_operator.secret import write_run_keys
from polyrl_rollout.agent.app import Agent
from polyrl_rollout.agent.conversation import AgentSettings
from polyrl_rollout.manager.server import Listen, Manager
from polyrl_rollout.testing.fake_engine import FakeEngine
from polyrl_rollout.weights.staging import Staging
from polyrl_trainer.client import RolloutClient
from polyrl_trainer.weights.publisher import WeightPublisher

EPOCH = 1
DEADLINE_S = 30.0
LOOPBACK = "::1"


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind((LOOPBACK, 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
async def test_everybody_meets_on_ipv6(tmp_path: Path) -> None:
    write_run_keys(keys := tmp_path / "keys")
    publisher = WeightPublisher(keys / "trainer.key", f"tcp://[{LOOPBACK}]:*", advertise=LOOPBACK)
    assert publisher.endpoint.startswith("tcp://[::1]:")
    ledger = Ledger(LedgerConfig(run_epoch=EPOCH))
    async with Manager(ledger, read_keys(ManagerKeys, keys / "manager.key"), EPOCH, Listen(LOOPBACK)) as manager:
        assert manager.endpoints.http.startswith("http://[::1]:")
        running = asyncio.create_task(manager.run())
        agent = asyncio.create_task(generate(manager.endpoints.agents, keys, tmp_path))
        async with RolloutClient.connect(manager.endpoints.trainer, keys / "trainer.key", EPOCH) as client:
            published = await asyncio.to_thread(publisher.publish, 0, [("w", torch.zeros(9))], {"config.json": b"{}"})
            await client.publish(published)
            await client.submit(
                [
                    Group(
                        0,
                        0,
                        purpose=Purpose.TRAIN,
                        prompt_ids=pack_ids([1, 2]),
                        n=1,
                        sampling=SamplingParams(4),
                        min_version=0,
                        max_version=0,
                    )
                ]
            )
            async with asyncio.timeout(DEADLINE_S):
                turn = await anext(client.turns())
            assert turn.response.sample == "0.0"
            await client.finish(True, "done")
        assert await asyncio.wait_for(agent, DEADLINE_S) == 0
        manager.stop()
        await running
    await asyncio.to_thread(publisher.close)


async def generate(endpoint: str, keys: Path, folder: Path) -> int:
    own, engine = engine_keys(keys, "engine"), FakeEngine()
    settings = AgentSettings(
        lambda: endpoint, own, run_epoch=EPOCH, engine="engine", pool=Pool.SPOT, drain_s=1.0, seed=0
    )
    staging = Staging("ipv6", "engine", folder)
    try:
        return await Agent(settings, engine, engine.capacity, staging).run()
    finally:
        staging.close()


@pytest.mark.parametrize(
    ("endpoint", "may_be"),
    [
        ("tcp://127.0.0.1:5001", False),
        ("tcp://10.1.2.3:5001", False),
        ("tcp://127.0.0.1:*", False),
        ("tcp://*:5001", True),
        ("tcp://[::1]:5001", True),
        ("tcp://job-manager:5001", True),
        ("tcp://10.1.2.3.example:5001", True),
    ],
)
def test_only_an_ipv4_address_is_surely_none_of_ipv6(endpoint: str, may_be: bool) -> None:
    assert may_be_ipv6(endpoint) is may_be


def test_a_host_stands_in_brackets_when_it_must() -> None:
    assert [bracketed(host) for host in ("fd00::1", "[fd00::1]", "10.0.0.1", "name")] == [
        "[fd00::1]",
        "[fd00::1]",
        "10.0.0.1",
        "name",
    ]
