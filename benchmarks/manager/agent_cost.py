"""What an agent costs beside SGLang: `python benchmarks/manager/agent_cost.py --repeats 3`, one JSON line per form.

The agent is its real process: HTTP client, stream decoder, token book, CURVE link; the manager is real, too, and
weights are published and pulled. Only SGLang is a fake, in a process of its own (see `fake_sglang`). CPU seconds are
the agent's alone, user + system, from submit until the manager has every token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import psutil
import torch
from drive import connected
from stand import EPOCH, JOB, Stand, standing

from polyrl.parent_death_signal import PARENT_PID
from polyrl.sample import Group, Purpose, SamplingParams
from polyrl.wire import pack_ids, unpack_ids
from polyrl_operator.secret import write_engine_keys
from polyrl_rollout.engines.sglang.launch import PYTHON
from polyrl_trainer.client import RolloutClient
from polyrl_trainer.weights.publisher import WeightPublisher

HERE: Final = Path(__file__).parent
FAKE: Final = HERE / "fake_sglang.py"
ENGINE: Final = "engine-1"
"""Not `agent`: the file of a run's keys of all agents has that name."""
CONFIG: Final = b'{"vocab_size": 151936, "max_position_embeddings": 32768}'
PROMPT_TOKENS: Final = 256
N: Final = 8
DEADLINE_S: Final = 300.0


@dataclass(frozen=True)
class Form:
    """How the fake SGLang streams."""

    cumulative: bool
    interval: int
    streams: int = 32
    tokens: int = 2000
    pace: float = 200.0

    def arguments(self) -> list[str]:
        flags = ["--stream-interval", str(self.interval), "--pace", str(self.pace)]
        return [*flags, "--cumulative"] if self.cumulative else flags


async def cost(form: Form) -> float:
    """Agent CPU seconds per 1M tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = {"type": "sglang", "maxRunning": form.streams, "maxContext": 16_384, "args": form.arguments()}
        job = {**JOB, "spec": {**JOB["spec"], "rollout": {"engine": engine}}}
        async with standing(folder, None, job) as stand, _agent(stand) as agent, connected(stand) as client:
            publisher = WeightPublisher(folder / "keys/trainer.key")
            tensors = {"weight": torch.zeros(8)}
            published = await asyncio.to_thread(publisher.publish, 0, tensors.items(), {"config.json": CONFIG})
            await client.publish(published)
            await _step(client, 0, N, 100)
            began = _cpu(agent)
            await _step(client, 1, form.streams, form.tokens)
            spent = _cpu(agent) - began
            await asyncio.to_thread(publisher.close)
    return spent / (form.streams * form.tokens) * 1e6


@asynccontextmanager
async def _agent(stand: Stand) -> AsyncIterator[psutil.Process]:
    launcher = stand.folder / "python"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    launcher.chmod(0o700)
    command = [sys.executable, "-m", "polyrl_rollout.agent", "--job", str(stand.folder / "job.json")]
    keys = write_engine_keys(stand.folder / "keys", ENGINE)
    command += ["--keys", str(keys), "--epoch", str(EPOCH), "--engine-name", ENGINE]
    command += ["--pool", "spot", "--manager-endpoints", str(stand.folder / "manager.json")]
    environment = {**os.environ, PARENT_PID: str(os.getpid()), PYTHON: str(launcher)}
    with (stand.folder / "agent.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
    try:
        yield psutil.Process(process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _step(client: RolloutClient, step: int, samples: int, tokens: int) -> None:
    """Submits, scores and takes that many samples, and checks each."""
    prompt = pack_ids(np.arange(PROMPT_TOKENS) + 1)
    numbers = range(step * 1000, step * 1000 + samples // N)
    sampling = SamplingParams(tokens)
    await client.submit(
        [
            Group(
                number,
                step,
                purpose=Purpose.TRAIN,
                prompt_ids=prompt,
                n=N,
                sampling=sampling,
                min_version=0,
                max_version=0,
            )
            for number in numbers
        ]
    )
    judge, left, deadline = asyncio.create_task(_judge(client)), samples, time.monotonic() + DEADLINE_S
    while left:
        batch = await client.next(
            step,
            purpose=Purpose.TRAIN,
            min_samples=1,
            max_samples=samples,
            max_tokens=10**9,
            deadline_s=deadline - time.monotonic(),
        )
        for scored in batch.samples:
            if len(unpack_ids(scored.response.ids)) != tokens:
                raise SystemExit(f"sample {scored.response.sample} has not the tokens that its engine streamed")
        await client.acknowledge(batch.number)
        left -= len(batch.samples)
    judge.cancel()


async def _judge(client: RolloutClient) -> None:
    async for turn in client.turns():
        await client.score(turn.response.sample, turn.response.turn, 1.0)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Both stream forms at ten tokens per event, and increments of one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=1)
    repeats = parser.parse_args().repeats
    for form in (Form(False, 10), Form(True, 10), Form(False, 1)):
        seconds = [asyncio.run(cost(form)) for _ in range(repeats)]
        record = {"cumulative": form.cumulative, "tokensPerEvent": form.interval, "streams": form.streams}
        record |= {"tokens": form.tokens, "repeats": repeats}
        figures = [round(min(seconds), 2), round(statistics.median(seconds), 2)]
        print(json.dumps({**record, "agentCpuSecondsPerMillionTokens": figures}), flush=True)


if __name__ == "__main__":
    main()
