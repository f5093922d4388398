"""The real SGLang on a CPU goes to sleep and wakes with other weights, in an order that does not kill it: by itself,
and as the manager orders it through its agent, for a learner that needs its device alone.

Nothing is freed there; which orders kill it was measured on the same release.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import Qwen2ForCausalLM

from polyrl.engines.control import Memory, Sleep, Wake
from polyrl.ledger.causes import RestPhase
from polyrl.manifest.rollout import EngineSpec, EngineType
from polyrl.sample import Group, Pool, Purpose, SamplingParams, Scored
from polyrl.wire import EngineCapacity, pack_ids, unpack_ids
from polyrl_operator.secret import engine_keys
from polyrl_rollout.agent.__main__ import run_agent
from polyrl_rollout.agent.conversation import AgentSettings
from polyrl_rollout.engines.port import EngineFailed
from polyrl_rollout.engines.sglang.engine import ControlRefused, SGLangEngine
from polyrl_rollout.weights.staging import Staging
from tests.integration.agent.test_agent_processes import EPOCH, Site, open_site
from tests.integration.engines.test_tensor_parallel import BUDGET, CPU_ARGS, VOCAB, generated, greedy, saved

pytestmark = [pytest.mark.asyncio, pytest.mark.sglang, pytest.mark.timeout(600)]

PLUGIN = Path(__file__).parents[2] / "sglang" / "sleep"
PROMPT = [5, 9, 14, 2, 33, 21]
NAME = "reserved-0"
WAIT_S = 240.0


class KeptEngine(SGLangEngine):
    """Outlives its agent."""

    async def close(self) -> None:
        pass

    async def end(self) -> None:
        await super().close()


async def test_an_engine_sleeps_and_wakes_with_the_next_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLUGIN), os.environ.get("PYTHONPATH", "")]))
    models = [saved(tmp_path / f"weights-{seed}", seed) for seed in range(2)]
    spec = EngineSpec(type=EngineType.SGLANG, max_context=256, args=CPU_ARGS)
    engine = KeptEngine(spec, sleeps=True)
    try:
        async with open_site(tmp_path) as site:
            await _trains_alone(site, engine, models, tmp_path)
        running = asyncio.create_task(generated(engine, f"{2:08d}", PROMPT))
        await asyncio.sleep(0)  # it is on its way
        await engine.sleep()
        await running
        await _is_guarded(engine, tmp_path / "weights-1")
        seconds = await engine.wake(7, tmp_path / "weights-1")
        assert engine.version == 7
        assert min(seconds.wait, seconds.load) > 0
        await engine.health()
        assert await generated(engine, f"{3:08d}", PROMPT) == greedy(models[1], PROMPT)
        await _wrong_orders_are_not_sent(engine, models[1])
    finally:
        await engine.end()


async def _trains_alone(site: Site, engine: KeptEngine, models: list[Qwen2ForCausalLM], folder: Path) -> None:
    """Two steps, each with its weights, of a learner that needs the device alone."""
    settings = AgentSettings(
        lambda: site.manager.endpoints.agents,
        engine_keys(site.keys, NAME),
        run_epoch=EPOCH,
        engine=NAME,
        pool=Pool.RESERVED,
        drain_s=4.0,
        seed=0,
    )
    staging = Staging("sleeps", settings.engine)
    agent = asyncio.create_task(run_agent(settings, engine, EngineCapacity(8, 4096, max_context=256), staging))
    judge = asyncio.create_task(site._judge())
    try:
        for step, model in enumerate(models):
            await _publish(site, folder / f"weights-{step}", step)
            await site.client.submit([_group(step)])
            asked = time.monotonic()
            (one,) = await _batch(site, step)
            assert unpack_ids(one.response.ids).tolist() == greedy(model, PROMPT)
            assert {span.version for span in one.response.spans} == {step}
            # The learner begins now.
            assert _rest(site).phase is RestPhase.ASLEEP
            with pytest.raises(EngineFailed, match="no weights yet"):
                await generated(engine, f"{90 + step:08d}", PROMPT)
            await engine.health()
            print(f"step {step} in {time.monotonic() - asked:.2f} s", site.manager._ledger.state.learner.rests)
        seconds = site.manager._ledger.state.learner.rests
        assert min(seconds.sleep_s, seconds.wake_s) > 0
        await site.client.submit([_group(1, number=7)])
        await _batch(site, 1, alone=False)
        assert engine.version == 1, "where there is room it stays awake"
    finally:
        judge.cancel()
        agent.cancel()
        await asyncio.gather(agent, judge, return_exceptions=True)


def _rest(site: Site) -> Any:
    return site.manager._ledger.state.engines[NAME].rest


async def _publish(site: Site, folder: Path, version: int) -> None:
    files = {"config.json": (folder / "config.json").read_bytes()}
    tensors = load_file(folder / "model.safetensors")
    await site.client.publish(await asyncio.to_thread(site.publisher.publish, version, tensors.items(), files))


def _group(step: int, number: int = -1) -> Group:
    sampling = SamplingParams(BUDGET, temperature=0.0, stop_token_ids=(VOCAB - 1,))
    return Group(
        step if number < 0 else number,
        step,
        purpose=Purpose.TRAIN,
        prompt_ids=pack_ids(PROMPT),
        n=1,
        sampling=sampling,
        min_version=step,
        max_version=step,
    )


async def _batch(site: Site, step: int, *, alone: bool = True) -> list[Scored]:
    """Acknowledged, as a learner does after its passes."""
    batch = await site.client.next(
        step, purpose=Purpose.TRAIN, min_samples=1, max_samples=1, max_tokens=10**6, deadline_s=WAIT_S, alone=alone
    )
    await site.client.acknowledge(batch.number)
    return list(batch.samples)


async def _is_guarded(engine: SGLangEngine, folder: Path) -> None:
    """Asleep it lives, takes no request and no weights, and is not asked to generate."""
    await engine.health()
    with pytest.raises(EngineFailed, match="no weights yet"):
        await generated(engine, f"{9:08d}", PROMPT)
    with pytest.raises(EngineFailed, match="its weights sleep"):
        await engine.load_weights(8, folder)


async def _wrong_orders_are_not_sent(engine: SGLangEngine, model: Qwen2ForCausalLM) -> None:
    """Each of these kills a server that gets it: a release under a request, a resume of what is awake."""
    requests = [asyncio.create_task(generated(engine, f"{number:08d}", PROMPT)) for number in range(20, 24)]
    await asyncio.sleep(0)  # they are on their way
    with pytest.raises(ControlRefused, match="requests run"):
        await engine._drive_or_kill(Sleep(frozenset({Memory.KEYS_AND_VALUES})))
    await engine._drive_or_kill(Wake())
    assert all(tokens == greedy(model, PROMPT) for tokens in await asyncio.gather(*requests))
    await engine.health()
