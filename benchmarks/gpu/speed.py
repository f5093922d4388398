"""How hard GPUs work for the learner: `make bench-gpu`; needs GPUs and no network, weights are drawn.

Shapes of Qwen2.5 from 0.5B on, each in as many processes as there are GPUs, each in a process of its own so that memory
is measured alone; full passes of ragged sequences, bfloat16. One line of JSON a shape: tokens per second, MFU with
attention, the most memory, the power limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import closing
from typing import Any, Final

import numpy as np
import torch

from polyrl_trainer.backends.configs import EngineConfig, ModelConfig, OptimizerConfig
from polyrl_trainer.backends.fsdp.start import LearnerGroup
from polyrl_trainer.backends.learners import Learners
from polyrl_trainer.backends.single_process import SingleProcess
from polyrl_trainer.losses import sft_loss
from polyrl_trainer.losses.sft import merge
from polyrl_trainer.sample import Sample

NO_GPU: Final = "bench-gpu: this machine has no GPU that torch {torch} can use, so nothing was measured"
COMMON: Final[dict[str, Any]] = {"model_type": "qwen2", "vocab_size": 151_936}
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "tie_word_embeddings": True},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "tie_word_embeddings": True},
    "3B": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
           "num_key_value_heads": 2, "tie_word_embeddings": True},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4},
}  # fmt: skip
"""As published by Qwen2.5's config.json files."""
WAIT_S: Final = 1800.0
WARM_UP, MEASURED = 2, 5
SEQUENCE: Final = (512, 2048)
"""Shortest and longest, tokens."""


def draw(tokens: int, vocabulary: int, seed: int) -> list[Sample]:
    """Ragged sequences, three quarters of each learned."""
    chance, rows, total = np.random.default_rng(seed), [], 0
    while total < tokens:
        length = int(chance.integers(*SEQUENCE))
        mask = (np.arange(length) >= length // 4).astype(np.float32)
        rows.append(Sample(chance.integers(0, vocabulary, length), mask, prompt_length=length // 4))
        total += length
    return rows


def measure(shape: str, device: str, ranks: int, pass_tokens: int) -> dict[str, Any]:
    """Of MEASURED optimizer steps of one full pass a rank."""
    model = ModelConfig({**COMMON, **SHAPES[shape]}, dtype="bfloat16")
    engine = EngineConfig(device, max_tokens_per_micro_batch=pass_tokens, wait_seconds=WAIT_S)
    learners: Learners = LearnerGroup(ranks, device, threads=1, wait_seconds=WAIT_S) if ranks > 1 else SingleProcess()
    vocabulary = int({**COMMON, **SHAPES[shape]}["vocab_size"])
    with closing(learners):
        backend = learners.learner(model, engine, OptimizerConfig(learning_rate=1e-6, total_steps=100))
        sums: dict[str, float] = {}
        began = time.monotonic()
        for step in range(WARM_UP + MEASURED):
            if step == WARM_UP:
                sums, began = {}, time.monotonic()
            found = backend.forward_backward(draw(pass_tokens * ranks, vocabulary, step), sft_loss).result(WAIT_S)
            backend.optim_step(found["tokens"]).result(WAIT_S)
            sums = merge(sums, found)
        seconds = time.monotonic() - began
        backend.close()
    used = sums["positions"] - sums["padded_positions"]
    peak = sums.get("device_flops_max")
    return {
        "shape": shape,
        "gpus": ranks,
        "tokensPerSecondPerGpu": round(used / seconds / ranks, 1),
        "mfu": None if peak is None else round(sums["flops"] / seconds / peak, 4),
        "peakGiB": round(sums.get("device_reserved_max", 0.0) / 2**30, 2),
        "passTokens": pass_tokens,
    }


def power_limit() -> str:
    """As the driver says, of the first GPU."""
    argv = ["nvidia-smi", "--query-gpu=name,power.limit", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def main() -> int:
    """One shape where it is named, else all, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--ranks", type=int, default=0, help="0: as many as there are GPUs")
    parser.add_argument("--pass-tokens", type=int, default=16384)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU.format(torch=torch.__version__))
        return 0
    ranks = given.ranks or (torch.cuda.device_count() if given.device == "cuda" else 1)
    if given.shape is not None:
        print(json.dumps(measure(given.shape, given.device, ranks, given.pass_tokens)), flush=True)
        return 0
    print(json.dumps({"gpu": power_limit(), "torch": torch.__version__}), flush=True)
    for shape in SHAPES:
        # One that does not fit says so, and the others are measured.
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--shape", shape], check=False, timeout=2 * WAIT_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
