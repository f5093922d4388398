"""What an update of weights costs an engine, in its parts, while it generates.

    .venv/bin/python benchmarks/weights/pause.py
    make bench-pause-sglang ARGS="--switch keep"

A real manager, agent and engine, a model of random weights, and samples that are never fewer than run at once; new
versions come meanwhile, each when the one before is served. The seconds are the engine's and the agent's own, as the
manager adds them up. Every sample must end with exactly the tokens that it asked for, of versions that only rise; the
manager counts tokens that were generated twice. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.append(str(Path(__file__).parents[1] / "manager"))
from drive import connected
from stand import EPOCH, JOB, Stand, standing

from polyrl.keys import ManagerKeys, read_keys
from polyrl.parent_death_signal import PARENT_PID
from polyrl.sample import Group, Purpose, SamplingParams, Scored
from polyrl.wire import pack_ids, unpack_ids
from polyrl_operator.secret import write_engine_keys
from polyrl_trainer.client import RolloutClient
from polyrl_trainer.weights.publisher import WeightPublisher

ENGINE: Final = "engine-1"
PARTS: Final = ("wait", "load", "verify")
N: Final = 8
"""Samples of a group; two groups run at once."""
PROMPT_TOKENS: Final = 16
TOKENS: Final = 96
"""Of a sample."""
VOCAB: Final = 4096
DEADLINE_S: Final = 300.0
"""For a version to be served, and for a batch."""
START_S: Final = 900.0
"""For the first version, which starts the engine; cores that others want make SGLang's imports alone take minutes."""
POLL_S: Final = 0.05
CPU_ARGS: Final = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "bfloat16", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--skip-server-warmup", "--disable-overlap-schedule", "--max-total-tokens", "16384"),
]


class Load:
    """Two groups at a time, until it is ended; checks every sample."""

    def __init__(self, client: RolloutClient, versions: int) -> None:
        self._client, self._versions = client, versions
        self._submitted = self.samples = self.mixed = 0
        self.missing = 0
        """Tokens that samples ended without."""
        self.ending = False

    async def run(self) -> None:
        """Until all that was submitted is back."""
        judge = asyncio.create_task(self._judge())
        try:
            await self._submit(2)
            while self.samples < self._submitted * N:
                batch = await self._client.next(
                    0, purpose=Purpose.TRAIN, min_samples=1, max_samples=N, max_tokens=10**9, deadline_s=DEADLINE_S
                )
                for scored in batch.samples:
                    self._check(scored)
                await self._client.acknowledge(batch.number)
                if not self.ending:
                    await self._submit(self.samples // N + 2 - self._submitted)
        finally:
            judge.cancel()

    async def _submit(self, count: int) -> None:
        prompt = pack_ids(np.arange(PROMPT_TOKENS) + 1)
        groups = [
            Group(
                self._submitted + number,
                0,
                purpose=Purpose.TRAIN,
                prompt_ids=prompt,
                n=N,
                sampling=SamplingParams(TOKENS),
                min_version=0,
                max_version=self._versions,
            )
            for number in range(count)
        ]
        self._submitted += len(groups)
        if groups:
            await self._client.submit(groups)

    def _check(self, scored: Scored) -> None:
        response = scored.response
        self.samples += 1
        self.missing += TOKENS - len(unpack_ids(response.ids))
        versions = [span.version for span in response.spans]
        if versions != sorted(versions):
            raise SystemExit(f"sample {response.sample} has tokens of versions {versions}, in this order")
        self.mixed += len(set(versions)) > 1

    async def _judge(self) -> None:
        async for turn in self._client.turns():
            await self._client.score(turn.response.sample, turn.response.turn, 1.0)


async def measure(engine: dict[str, Any], versions: int, hidden: int, layers: int) -> dict[str, Any]:
    """Seconds by part of each update but the first load, and what became of the samples."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = {**JOB["spec"]["recipe"], "sampling": {"maxNewTokens": TOKENS}}
        job = {**JOB, "spec": {"recipe": recipe, "rollout": {"engine": engine}}}
        async with standing(folder, None, job) as stand, agent_of(stand), connected(stand) as client:
            publisher = WeightPublisher(folder / "keys/trainer.key")
            try:
                return await _update(stand, client, publisher, list(policies(hidden, layers, versions)))
            finally:
                await asyncio.to_thread(publisher.close)


async def _update(
    stand: Stand, client: RolloutClient, publisher: WeightPublisher, models: list[tuple[dict[str, Any], bytes]]
) -> dict[str, Any]:
    load, loading, updates = Load(client, len(models) - 1), None, []
    for version, (tensors, config) in enumerate(models):
        before = await numbers(stand)
        ref = await asyncio.to_thread(publisher.publish, version, tensors.items(), {"config.json": config})
        await client.publish(ref)
        after = await _served(stand, version + 1, loading)
        if loading is None:
            loading = asyncio.create_task(load.run())
        else:
            updates.append({part: after[part] - before[part] for part in PARTS})
        await _some_samples(load, loading)
    load.ending = True
    await loading
    after = await numbers(stand)
    size = sum(tensor.numel() * tensor.element_size() for tensor in models[0][0].values())
    return {
        "modelBytes": size,
        "updates": len(updates),
        **{f"{part}Seconds": round(statistics.median(one[part] for one in updates), 4) for part in PARTS},
        "pauseSeconds": round(statistics.median(sum(one.values()) for one in updates), 4),
        "longestPauseSeconds": round(max(sum(one.values()) for one in updates), 4),
        "samples": load.samples,
        "samplesOfSeveralVersions": load.mixed,
        "tokensMissing": load.missing,
        "tokensGeneratedTwice": after["regenerated"],
    }


async def _some_samples(load: Load, loading: asyncio.Task[None]) -> None:
    """Until another group is back, so that each update meets requests in the middle."""
    wanted = load.samples + N
    async with asyncio.timeout(DEADLINE_S):
        while load.samples < wanted and not loading.done():  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(POLL_S)
    if loading.done():
        loading.result()


async def _served(stand: Stand, loads: int, loading: asyncio.Task[None] | None) -> dict[str, float]:
    async with asyncio.timeout(START_S if loading is None else DEADLINE_S):
        while (found := await numbers(stand))["loads"] < loads:
            if loading is not None and loading.done():
                loading.result()
            await asyncio.sleep(POLL_S)
    return found


async def numbers(stand: Stand) -> dict[str, float]:
    """The manager's, of updates and tokens."""
    token = read_keys(ManagerKeys, stand.folder / "keys/manager.key").http_token
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as http,
        http.get(f"{stand.endpoints.http}/metrics") as response,
    ):
        families = text_string_to_metric_families(await response.text())
        found: dict[str, float] = {}
        for sample in (sample for family in families for sample in family.samples):
            if sample.name == "polyrl_weight_loads_total":
                found["loads"] = sample.value
            elif sample.name in ("polyrl_weight_pause_seconds_total", "polyrl_tokens_total"):
                found[next(iter(sample.labels.values()))] = sample.value
    return found


def policies(hidden: int, layers: int, count: int) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Versions of a Qwen2 in bfloat16 that never ends a sample by itself, and its config.json."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
    )
    tensors = Qwen2ForCausalLM(config).bfloat16().state_dict()
    for _ in range(count + 1):
        yield tensors, config.to_json_string(use_diff=False).encode()
        tensors = {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in tensors.items()}


@asynccontextmanager
async def agent_of(stand: Stand) -> AsyncIterator[None]:
    """One rollout's agent; its words go to standard error."""
    command = [sys.executable, "-m", "polyrl_rollout.agent", "--job", str(stand.folder / "job.json")]
    command += ["--keys", str(write_engine_keys(stand.folder / "keys", ENGINE)), "--epoch", str(EPOCH)]
    command += ["--engine-name", ENGINE, "--pool", "spot", "--manager-endpoints", str(stand.folder / "manager.json")]
    environment = {**os.environ, PARENT_PID: str(os.getpid())}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=sys.stderr)
    try:
        yield
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=["embedded", "sglang"], default="embedded")
    parser.add_argument("--switch", choices=["recompute", "keep"], default="recompute")
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    given = parser.parse_args()
    engine = {"type": given.engine, "maxRunning": 2 * N, "maxContext": 512, "weightSwitch": given.switch}
    engine |= {"kvTokens": 16384} if given.engine == "embedded" else {"args": CPU_ARGS}
    found = asyncio.run(measure(engine, given.updates, given.hidden, given.layers))
    print(json.dumps({"engine": given.engine, "weightSwitch": given.switch, **found}), flush=True)


if __name__ == "__main__":
    main()
