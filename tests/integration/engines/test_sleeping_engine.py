"""The real SGLang on a CPU goes to sleep and wakes with other weights, in an order that does not kill it.

Nothing is freed there; which orders kill it was measured on the same release.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from transformers import Qwen2ForCausalLM

from polyrl.engines.control import Memory, Sleep, Wake
from polyrl.manifest.rollout import EngineSpec, EngineType
from polyrl_rollout.engines.port import EngineFailed
from polyrl_rollout.engines.sglang.engine import ControlRefused, SGLangEngine
from tests.integration.engines.test_tensor_parallel import CPU_ARGS, generated, greedy, saved

pytestmark = [pytest.mark.asyncio, pytest.mark.sglang, pytest.mark.timeout(600)]

PLUGIN = Path(__file__).parents[2] / "sglang" / "sleep"
PROMPT = [5, 9, 14, 2, 33, 21]


async def test_an_engine_sleeps_and_wakes_with_the_next_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLUGIN), os.environ.get("PYTHONPATH", "")]))
    models = [saved(tmp_path / f"weights-{seed}", seed) for seed in range(2)]
    engine = SGLangEngine(EngineSpec(type=EngineType.SGLANG, max_context=256, args=CPU_ARGS))
    try:
        await engine.start(tmp_path / "weights-0")
        await engine.load_weights(1, tmp_path / "weights-0")
        assert await generated(engine, f"{1:08d}", PROMPT) == greedy(models[0], PROMPT)
        running = asyncio.create_task(generated(engine, f"{2:08d}", PROMPT))
        await asyncio.sleep(0)  # it is on its way
        began = time.monotonic()
        await engine.sleep()
        slept = time.monotonic()
        await running
        await _is_guarded(engine, tmp_path / "weights-1")
        began_waking = time.monotonic()
        await engine.wake(2, tmp_path / "weights-1")
        print(f"asleep in {slept - began:.2f} s, awake with new weights in {time.monotonic() - began_waking:.2f} s")
        assert engine.version == 2
        await engine.health()
        assert await generated(engine, f"{3:08d}", PROMPT) == greedy(models[1], PROMPT)
        await _wrong_orders_are_not_sent(engine, models[1])
    finally:
        await engine.close()


async def _is_guarded(engine: SGLangEngine, folder: Path) -> None:
    """Asleep it lives, takes no request and no weights, and is not asked to generate."""
    await engine.health()
    with pytest.raises(EngineFailed, match="no weights yet"):
        await generated(engine, f"{9:08d}", PROMPT)
    with pytest.raises(EngineFailed, match="its weights sleep"):
        await engine.load_weights(3, folder)


async def _wrong_orders_are_not_sent(engine: SGLangEngine, model: Qwen2ForCausalLM) -> None:
    """Each of these kills a server that gets it: a release under a request, a resume of what is awake."""
    requests = [asyncio.create_task(generated(engine, f"{number:08d}", PROMPT)) for number in range(20, 24)]
    await asyncio.sleep(0)  # they are on their way
    with pytest.raises(ControlRefused, match="requests run"):
        await engine._drive_or_kill(Sleep(frozenset({Memory.KEYS_AND_VALUES})))
    await engine._drive_or_kill(Wake())
    assert all(tokens == greedy(model, PROMPT) for tokens in await asyncio.gather(*requests))
    await engine.health()
