"""What the manager costs: `python benchmarks/manager/run.py [--quick]` prints one JSON line per load.

The manager is its real process, CURVE on; agents are fakes that speak the real protocol from this process, and the
trainer is the real client, also here: their CPU is not counted. Figures per load: the manager's CPU seconds (user +
system) from submit to the last acknowledgement per 1M tokens, bytes from agents per token, seconds until every sample
is placed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import zmq.asyncio

from polyrl.control import Endpoints, parse_endpoints
from polyrl.keys import AgentKeys, read_keys
from polyrl.leash import PARENT_PID
from polyrl.sample import Group, Pool, Purpose, SamplingParams
from polyrl.wire import Hello, pack_ids
from polyrl_operator.keygen import write_run_keys
from polyrl_rollout.fake_agent import FakeAgent
from polyrl_trainer.client import RolloutClient

EPOCH: Final = 1
START_S: Final = 30.0
LOAD_S: Final = 900.0
PROMPT_TOKENS: Final = 256
LOOK_S: Final = 0.005

JOB: Final = {
    "apiVersion": "polyrl.dev/v1alpha1",
    "kind": "PolyRLJob",
    "metadata": {"name": "manager-benchmark"},
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


@dataclass(frozen=True)
class Load:
    """`groups` x `n` samples of `tokens` tokens on `engines` engines, `chunk` tokens of each sample per Deltas."""

    name: str
    engines: int
    groups: int
    n: int
    tokens: int
    chunk: int = 10

    @property
    def samples(self) -> int:
        return self.groups * self.n


LOADS: Final = (
    Load("place 128x8 on 8 engines", engines=8, groups=128, n=8, tokens=10),
    Load("8x16x1000", engines=8, groups=16, n=8, tokens=1000),
    Load("8x16x4000", engines=8, groups=16, n=8, tokens=4000),
)


@asynccontextmanager
async def manager(folder: Path) -> AsyncIterator[tuple[psutil.Process, Endpoints]]:
    """The manager's process, ready."""
    write_run_keys(folder / "keys")
    (folder / "job.json").write_text(json.dumps(JOB))
    file = folder / "manager.json"
    command = [sys.executable, "-m", "polyrl_rollout.manager", "--job", str(folder / "job.json"), "--epoch", str(EPOCH)]
    command += ["--keys", str(folder / "keys/manager.key"), "--endpoints", str(file)]
    command += ["--journal", str(folder / "journal.sqlite")]
    process = await asyncio.create_subprocess_exec(*command, env={**os.environ, PARENT_PID: str(os.getpid())})
    try:
        async with asyncio.timeout(START_S):
            while not file.exists():  # noqa: ASYNC110 - nothing announces a file
                await asyncio.sleep(LOOK_S)
        yield psutil.Process(process.pid), parse_endpoints(file.read_bytes(), str(file))
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def run_load(load: Load) -> dict[str, Any]:
    """One load against a fresh manager."""
    with tempfile.TemporaryDirectory() as name:
        async with manager(Path(name)) as (process, ends):
            context = zmq.asyncio.Context()
            keys = read_keys(AgentKeys, Path(name) / "keys/agent.key")
            agents = [FakeAgent(context, ends.agents, keys, _hello(load, i), load.chunk) for i in range(load.engines)]
            running = [asyncio.create_task(agent.run()) for agent in agents]
            async with RolloutClient.connect(ends.trainer, Path(name) / "keys/trainer.key", EPOCH) as client:
                await client.publish(0, "tcp://127.0.0.1:1", "k" * 40, b"")
                figures = await asyncio.wait_for(_measure(load, client, agents, process), LOAD_S)
                await client.finish(True, "")
                await asyncio.gather(*running)
            context.term()
    return figures


def _hello(load: Load, number: int) -> Hello:
    room = -(-load.samples // load.engines)
    limit = PROMPT_TOKENS + load.tokens
    return Hello(EPOCH, f"fake-{number}", Pool.SPOT, room, 2 * room * limit, limit, -1)


async def _measure(
    load: Load, client: RolloutClient, agents: list[FakeAgent], process: psutil.Process
) -> dict[str, Any]:
    judge = asyncio.create_task(_judge(client))
    cpu, began = _cpu(process), time.monotonic()
    await client.submit([_group(load, number) for number in range(load.groups)])
    while sum(len(agent.assigned) for agent in agents) < load.samples:  # noqa: ASYNC110 - the fakes stay simple
        await asyncio.sleep(LOOK_S)
    placed = time.monotonic() - began
    await _take(load, client)
    judge.cancel()
    tokens = load.samples * load.tokens
    return {
        "load": load.name,
        "managerCpuSecondsPerMillionTokens": round((_cpu(process) - cpu) / tokens * 1e6, 3),
        "bytesPerToken": round(sum(agent.bytes_sent for agent in agents) / tokens, 2),
        "secondsToPlace": round(placed, 3),
        "wallSeconds": round(time.monotonic() - began, 2),
        "tokens": tokens,
        "managerRssMb": round(process.memory_info().rss / 1e6, 1),
    }


def _group(load: Load, number: int) -> Group:
    prompt = pack_ids(range(PROMPT_TOKENS))
    return Group(number, 0, Purpose.TRAIN, prompt, load.n, SamplingParams(load.tokens), 0, 0)


async def _judge(client: RolloutClient) -> None:
    async for turn in client.turns():
        await client.score(turn.response.sample, turn.response.turn, 1.0)


async def _take(load: Load, client: RolloutClient) -> None:
    left = load.samples
    while left:
        batch = await client.next(
            0, purpose=Purpose.TRAIN, min_samples=1, max_samples=64, max_tokens=10**9, deadline_s=LOAD_S
        )
        left -= len(batch.samples)
        await client.acknowledge(batch.batch)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Runs the loads one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the first two loads")
    for load in LOADS[: 2 if parser.parse_args().quick else None]:
        print(json.dumps(asyncio.run(run_load(load))), flush=True)


if __name__ == "__main__":
    main()
