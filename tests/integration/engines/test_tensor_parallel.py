"""One engine of two ranks: the real SGLang with `tensorParallel: 2` on a CPU, beside plain transformers."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from polyrl.manifest.rollout import EngineSpec, EngineType
from polyrl.sample import SamplingParams
from polyrl_rollout.engines.port import GenerateRequest
from polyrl_rollout.engines.sglang.engine import SGLangEngine

pytestmark = [pytest.mark.asyncio, pytest.mark.sglang, pytest.mark.timeout(900)]

PLUGIN = Path(__file__).parents[2] / "sglang" / "tensor-parallel"
VOCAB = 64
BUDGET = 24
CPU_ARGS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--skip-server-warmup", "--disable-overlap-schedule", "--max-total-tokens", "4096"),
]


def saved(folder: Path, seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": None, "eos_token_id": VOCAB - 1, "pad_token_id": 0}
    config = Qwen2Config(
        vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.15, **sizes, **ids
    )
    config.tie_word_embeddings = False
    model = Qwen2ForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def greedy(model: Qwen2ForCausalLM, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    while len(ids) < len(prompt) + BUDGET and ids[-1] != VOCAB - 1:
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


async def generated(engine: SGLangEngine, rid: str, prompt: list[int]) -> list[int]:
    sampling = SamplingParams(0, temperature=0.0)
    request = GenerateRequest(rid, prompt, max_new_tokens=BUDGET, sampling=sampling, seed=1)
    return [token for chunk in [one async for one in engine.generate(request)] for token in chunk.ids]


async def test_two_ranks_generate_and_take_new_weights_as_one_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By default SGLang binds one rank to each NUMA node, and asserts where there are fewer.
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLUGIN), os.environ.get("PYTHONPATH", "")]))
    models = [saved(tmp_path / f"weights-{seed}", seed) for seed in range(2)]
    prompt = [5, 9, 14, 2, 33, 21]
    engine = SGLangEngine(EngineSpec(type=EngineType.SGLANG, tensor_parallel=2, max_context=256, args=CPU_ARGS))
    try:
        capacity = await engine.start(tmp_path / "weights-0")
        assert capacity.max_running == 256, "one engine, whatever its ranks"
        ranks = [one for one in psutil.Process(engine.pid).children(recursive=True) if "scheduler" in one.name()]
        assert len(ranks) == 2
        for version, model in enumerate(models, start=1):
            await engine.load_weights(version, tmp_path / f"weights-{version - 1}")
            assert await generated(engine, f"{version:08d}", prompt) == greedy(model, prompt)
    finally:
        await engine.close()
