"""An SGLang engine that gives its GPU's memory back and takes it again: bytes, seconds, and the same tokens afterwards.

For `check`. Needs an environment with SGLang, named by POLYRL_SGLANG_PYTHON. What is freed is what the driver says.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from polyrl.manifest.rollout import EngineSpec, EngineType
from polyrl.sample import SamplingParams
from polyrl_rollout.engines.port import GenerateRequest
from polyrl_rollout.engines.sglang.engine import SGLangEngine
from polyrl_rollout.engines.sglang.launch import PYTHON

SHARE: Final = 0.2
"""Of what is free on the GPU: some 16 GB, beside which what a sleeping engine keeps is small."""
KEPT: Final = 0.35
"""Of what the awake engine took, at most: its CUDA context and workspaces stay, 1.1 GB of a small model's."""
MOST_S: Final = 30.0
"""To sleep, and to wake and load: a step that is shorter is not worth it."""
ON_CPU: Final = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--skip-server-warmup", "--disable-overlap-schedule", "--max-total-tokens", "4096"),
]
GIB: Final = 1 << 30
PROMPT: Final = [5, 9, 14, 2, 33, 21]
TOKENS: Final = 32

Found = Iterator[tuple[str, float, float]]


def hand_over(model: dict[str, Any], device: str) -> Found:
    """Nothing where there is no SGLang, which it says."""
    if PYTHON not in os.environ and importlib.util.find_spec("sglang") is None:
        print(f"--  hand-over: {PYTHON} names no interpreter with SGLang, so it was not checked", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        given = {key: value for key, value in model.items() if key != "model_type"}
        AutoModelForCausalLM.from_config(AutoConfig.for_model(model["model_type"], **given)).save_pretrained(path)
        yield from asyncio.run(_handed_over(path, device))


async def _handed_over(folder: Path, device: str) -> list[tuple[str, float, float]]:
    on_cpu = device == "cpu"
    fields: dict[str, Any] = {"args": ON_CPU} if on_cpu else {"mem_fraction": SHARE}
    engine = SGLangEngine(EngineSpec(type=EngineType.SGLANG, max_context=256, **fields), sleeps=True)
    found, before = list[tuple[str, float, float]](), _used(on_cpu)
    try:
        await engine.start(folder)
        await engine.load_weights(0, folder)
        first, awake = await _tokens(engine, 0), _used(on_cpu)
        began = time.monotonic()
        await engine.sleep()
        found.append(("hand-over: seconds to sleep", time.monotonic() - began, MOST_S))
        asleep, began = _used(on_cpu), time.monotonic()
        seconds = await engine.wake(1, folder)
        found.append(("hand-over: seconds to wake", time.monotonic() - began - seconds.load, MOST_S))
        found.append(("hand-over: seconds to reload", seconds.load, MOST_S))
        if not on_cpu:
            print(f"    hand-over: GiB awake {(awake - before) / GIB:.2f}, asleep {(asleep - before) / GIB:.2f}")
            found.append(("hand-over: share that is kept", (asleep - before) / max(1, awake - before), KEPT))
            found.append(("hand-over: GiB awake again, apart", abs(_used(on_cpu) - awake) / GIB, 1.0))
        apart = sum(one != other for one, other in zip(first, await _tokens(engine, 1), strict=True))
        found.append(("hand-over: tokens apart after it", float(apart), 0.0))
    finally:
        await engine.close()
    return found


async def _tokens(engine: SGLangEngine, number: int) -> list[int]:
    sampling = SamplingParams(0, temperature=0.0)
    request = GenerateRequest(f"{number:08d}", PROMPT, max_new_tokens=TOKENS, sampling=sampling, seed=1)
    return [token for chunk in [one async for one in engine.generate(request)] for token in chunk.ids]


def _used(on_cpu: bool) -> int:
    """Bytes of the GPU that anybody holds."""
    if on_cpu:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free
