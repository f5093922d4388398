"""A manager on real sockets, with real keys, in this process or in its own: what all tests of this folder stand on."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.asyncio

from polyrl.control import Endpoints, parse_endpoints
from polyrl.errors import RunFailed
from polyrl.keys import AgentKeys, ManagerKeys, read_keys
from polyrl.ledger import Ledger, LedgerConfig
from polyrl.manifest.job import PolyRLJob
from polyrl.sample import Group, Pool, Purpose, SamplingParams, Scored
from polyrl.testing.started import StartedProcess
from polyrl.weights import WeightsRef
from polyrl.wire import Hello, pack_ids, unpack_ids
from polyrl.wire.engine_identity import engine_keys, identity_of
from polyrl_operator.secret import write_run_keys
from polyrl_rollout.manager.journal import Journal
from polyrl_rollout.manager.server import Listen, Manager
from polyrl_rollout.testing.fake_agent import FakeAgent, made_tokens
from polyrl_trainer.client import RolloutClient

EPOCH = 3
DEADLINE_S = 60.0
POLL_S = 0.01
LEASE_S = 5.0
"""Agents, trainer and manager share this process here: that it is starved for a moment may cost no engine."""
JOB = {
    "apiVersion": "polyrl.dev/v1alpha1",
    "kind": "PolyRLJob",
    "metadata": {"name": "fuzz"},
    "spec": {
        "recipe": {
            "mode": "rl",
            "model": {"path": "model"},
            "data": {"rl": [{"path": "prompts.jsonl"}]},
            "reward": {"function": "reward:score"},
            "algorithm": {"steps": 1},
        }
    },
}


@dataclass
class Site:
    """A running manager, and what is needed to reach it."""

    manager: Manager
    ledger: Ledger
    keys: Path
    context: zmq.asyncio.Context
    running: asyncio.Task[None]

    def hello(self, name: str, **fields: Any) -> Hello:
        own = {"run_epoch": EPOCH, "engine": name, "pool": Pool.SPOT, "max_running": 16, "kv_tokens": 100_000}
        return Hello(**{**own, "max_context": 10_000, "weight_version": -1, **fields})

    def agent(self, name: str) -> FakeAgent:
        keys = engine_keys(self.keys, name)
        return FakeAgent(self.context, self.manager.endpoints.agents, keys, self.hello(name))

    def client(self, **options: Any) -> AbstractAsyncContextManager[RolloutClient]:
        options = {"run_epoch": EPOCH, "connect_timeout_s": 5.0, **options}
        return RolloutClient.connect(self.manager.endpoints.trainer, self.keys / "trainer.key", **options)

    def agent_socket(self, engine: str) -> zmq.asyncio.Socket:
        """A DEALER of a named engine's agent, for those who do not behave as agents do."""
        return self.agents_dealer(identity_of(engine, engine_keys(self.keys, engine)))

    def agents_dealer(self, identity: bytes) -> zmq.asyncio.Socket:
        """A DEALER with the agents' key."""
        keys = read_keys(AgentKeys, self.keys / "agent.key")
        return self.dealer(self.manager.endpoints.agents, keys.public_key, keys.secret_key, identity)

    def dealer(self, endpoint: str, public: str, secret: str, identity: bytes) -> zmq.asyncio.Socket:
        socket = self.context.socket(zmq.DEALER)
        socket.curve_publickey, socket.curve_secretkey = public.encode(), secret.encode()
        socket.curve_serverkey = self.manager.endpoints.public_key.encode()
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.LINGER, 0)
        # One whose place was taken, or who was refused, would dial again of itself, at a moment of its own.
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.connect(endpoint)
        return socket

    async def eventually(self, condition: Callable[[], object]) -> None:
        """Returns once `condition` holds, fails after DEADLINE_S."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 - any condition
                await asyncio.sleep(POLL_S)

    def group(self, number: int, n: int = 4, tokens: int = 40) -> Group:
        return Group(
            number,
            0,
            purpose=Purpose.TRAIN,
            prompt_ids=pack_ids([1, 2, 3]),
            n=n,
            sampling=SamplingParams(tokens),
            min_version=0,
            max_version=0,
        )

    async def judge_all(self, client: RolloutClient) -> None:
        async for turn in client.turns():
            await client.score(turn.response.sample, turn.response.turn, 1.0, {})

    async def run_work(self, client: RolloutClient, groups: list[Group]) -> list[Scored]:
        """Submits, judges, takes and acknowledges everything, and checks every token."""
        judge = asyncio.create_task(self.judge_all(client))
        taken: list[Scored] = []
        try:
            await client.publish(WeightsRef(0, "tcp://127.0.0.1:1", public_key="k" * 40, manifest_hash=b"hash"))
            await client.submit(groups)
            while len(taken) < sum(group.n for group in groups):
                batch = await client.next(
                    0, purpose=Purpose.TRAIN, min_samples=8, max_samples=16, max_tokens=10**6, deadline_s=DEADLINE_S
                )
                taken += batch.samples
                await client.acknowledge(batch.number)
        finally:
            judge.cancel()
        for scored in taken:
            name, ids = scored.response.sample, unpack_ids(scored.response.ids)
            assert np.array_equal(ids, made_tokens(name, 0, len(ids))), name
        return taken


@asynccontextmanager
async def _open_site(folder: Path, lease_s: float, journal: Journal | None = None) -> AsyncIterator[Site]:
    write_run_keys(folder)
    ledger = Ledger(LedgerConfig(run_epoch=EPOCH, lease_s=lease_s, lost_s=lease_s, beat_s=0.3))
    context = zmq.asyncio.Context()
    try:
        own, job = read_keys(ManagerKeys, folder / "manager.key"), PolyRLJob.model_validate(JOB)
        async with Manager(ledger, own, EPOCH, Listen(metrics_port=0), journal, job=job) as manager:
            running = asyncio.create_task(manager.run())
            yield Site(manager, ledger, folder, context, running)
            manager.stop()
            await asyncio.gather(running, return_exceptions=True)
    finally:
        context.destroy(linger=0)


@pytest.fixture
async def site(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    """Its lease is LEASE_S, or the fixture's parameter."""
    async with _open_site(tmp_path / "keys", getattr(request, "param", LEASE_S)) as opened:
        yield opened


@pytest.fixture
async def journaled_site(tmp_path: Path) -> AsyncIterator[Site]:
    """With a journal, which is new. A manager whose disk has failed says so at its end too."""
    with suppress(RunFailed):
        async with _open_site(tmp_path / "keys", LEASE_S, Journal(tmp_path / "journal.sqlite", EPOCH)) as opened:
            yield opened


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[tuple[Path, Endpoints]]:
    write_run_keys(tmp_path / "keys")
    (tmp_path / "job.json").write_text(json.dumps(JOB))
    file = tmp_path / "manager.json"
    command = [sys.executable, "-m", "polyrl_rollout.manager", "--job", f"{tmp_path}/job.json", "--epoch", str(EPOCH)]
    command += ["--keys", f"{tmp_path}/keys/manager.key", "--endpoints", str(file)]
    command += ["--journal", f"{tmp_path}/journal.sqlite"]
    with (tmp_path / "log").open("wb") as log:
        process = StartedProcess(command, stderr=log)
    async with asyncio.timeout(DEADLINE_S):
        while not file.exists():  # noqa: ASYNC110 - nothing announces a file
            await asyncio.sleep(0.02)
    yield tmp_path, parse_endpoints(file.read_bytes(), str(file))
    assert process.poll() is None, (tmp_path / "log").read_text()[-4000:]
    process.kill()
    process.wait()
