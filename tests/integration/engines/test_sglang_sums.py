"""The real SGLang on a CPU says what it holds: one whose tensors are others than those it was given never serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from polyrl.manifest.rollout import EngineSpec, EngineType
from polyrl.sample import Group, Pool, Purpose, SamplingParams
from polyrl.weights.engine_sums import EngineSum
from polyrl.wire import EngineCapacity, pack_ids, unpack_ids
from polyrl_operator.secret import engine_keys
from polyrl_rollout.agent.app import EXIT_FAILED, Agent
from polyrl_rollout.agent.conversation import AgentSettings
from polyrl_rollout.engines.sglang.engine import SGLangEngine
from polyrl_rollout.weights.staging import Staging
from tests.integration.agent.test_agent_processes import EPOCH, Site, open_site
from tests.integration.engines.test_tensor_parallel import BUDGET, CPU_ARGS, greedy, saved

pytestmark = [pytest.mark.asyncio, pytest.mark.sglang, pytest.mark.timeout(900)]

SPEC = EngineSpec(type=EngineType.SGLANG, max_context=256, args=CPU_ARGS)
PROMPT = [5, 9, 14, 2, 33, 21]
WAIT_S = 400.0
AMX = " amx" if "amx_tile" in Path("/proc/cpuinfo").read_text().split() else ""
"""SGLang lays weights out for it, where a CPU has it."""


class Corrupted(SGLangEngine):
    """Its tensors turn into others between a load and the question what they are."""

    async def _sum(self, folder: Path) -> EngineSum | None:
        await self._control("POST", "/weights_checker", {"action": "reset_tensors"}, 60.0)
        return await super()._sum(folder)


@asynccontextmanager
async def agent_of(site: Site, name: str, engine: SGLangEngine, folder: Path) -> AsyncIterator[asyncio.Task[int]]:
    keys = engine_keys(site.keys, name)
    settings = AgentSettings(
        lambda: site.manager.endpoints.agents, keys, run_epoch=EPOCH, engine=name, pool=Pool.SPOT, drain_s=4.0, seed=0
    )
    agent = Agent(settings, engine, EngineCapacity(8, 4096, max_context=256), Staging("sums", name, folder))
    running = asyncio.create_task(agent.run())
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 - the status has no event of its own
            await asyncio.sleep(0.1)


async def test_sums_are_of_what_is_held_and_repeat_from_one_server_to_the_next(tmp_path: Path) -> None:
    models = [tmp_path / f"weights-{seed}" for seed in range(2)]
    for seed, folder in enumerate(models):
        saved(folder, seed)
    sums = []
    for order in ((0, 1, 0), (1,)):
        engine = SGLangEngine(SPEC)
        try:
            await engine.start(models[0])
            loads = [await engine.load_weights(n, models[which]) for n, which in enumerate(order, start=1)]
        finally:
            await engine.close()
        sums += [load.sum for load in loads]
        print([f"load {load.load:.3f} s, checks {load.verify:.3f} s" for load in loads])
    first, second, again, elsewhere = sums
    assert first is not None
    assert first == again != second == elsewhere
    assert first.kind == f"SGLang 0.5.23 cpu float32 tp1 dp1 pp1 ep1{AMX}"
    assert first.exact


async def test_one_that_holds_something_else_is_not_served_and_its_successor_serves_the_right_weights(
    tmp_path: Path,
) -> None:
    model = saved(tmp_path / "weights", 3)
    async with open_site(tmp_path) as site:
        files = {"config.json": (tmp_path / "weights/config.json").read_bytes()}
        tensors = load_file(tmp_path / "weights/model.safetensors")
        ref = await asyncio.to_thread(site.publisher.publish, 0, tensors.items(), files)
        await site.client.publish(ref)
        async with agent_of(site, "good", SGLangEngine(SPEC), tmp_path):
            await until(lambda: site.serving() == ["good"])
            async with agent_of(site, "corrupted", Corrupted(SPEC), tmp_path) as ending:
                assert await asyncio.wait_for(ending, WAIT_S) == EXIT_FAILED
            assert site.manager._sums.outcomes == {"first": 1, "equal": 0, "incomparable": 0, "refused": 1}
            assert site.serving() == ["good"]
        async with agent_of(site, "successor", SGLangEngine(SPEC), tmp_path):
            await until(lambda: site.serving() == ["successor"])
            assert site.manager._sums.outcomes["equal"] == 1
            assert await one_sample(site) == greedy(model, PROMPT)


async def one_sample(site: Site) -> list[int]:
    judge = asyncio.create_task(site._judge())
    sampling = SamplingParams(BUDGET, temperature=0.0)
    group = Group(
        1,
        0,
        purpose=Purpose.TRAIN,
        prompt_ids=pack_ids(PROMPT),
        n=1,
        sampling=sampling,
        min_version=0,
        max_version=0,
    )
    await site.client.submit([group])
    batch = await site.client.next(
        0, purpose=Purpose.TRAIN, min_samples=1, max_samples=1, max_tokens=10**6, deadline_s=WAIT_S
    )
    judge.cancel()
    (scored,) = batch.samples
    return [int(token) for token in unpack_ids(scored.response.ids)]
