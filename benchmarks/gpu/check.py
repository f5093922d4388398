"""Whether the learner's ways on GPUs compute what its ways on CPUs do: `make gpu-check`; needs GPUs and no network.

packed      torch's variable-length kernel against dense masks: logprobs and gradients of one pass, bfloat16
dtype       bfloat16 against float32 on the CPU: loss of the first steps
ranks       1 to as many processes as there are GPUs (8 at most): loss, gradient norm of ten steps against one process
moments     those of the optimizer in the host's memory against the GPU's: losses and norms, one process and a rank
hand-over   SGLang on the learner's GPU: bytes that it gives back asleep, seconds to sleep, to wake and to reload

Prints a line for each, and ends with 1 when one is off. `--device cpu` tries this program itself, on gloo.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from hand_over import hand_over

from polyrl.manifest.spec import CpuOffload
from polyrl_trainer.backends.configs import CheckpointConfig, EngineConfig, ModelConfig, OptimizerConfig
from polyrl_trainer.backends.fsdp.start import LearnerGroup
from polyrl_trainer.backends.learners import Learner
from polyrl_trainer.backends.models.attention import PACKED_ATTENTION
from polyrl_trainer.backends.models.model_factory import DENSE_ATTENTION
from polyrl_trainer.backends.packing import PackingPolicy
from polyrl_trainer.backends.policy import create_policy
from polyrl_trainer.backends.single_process import create_torch_backend
from polyrl_trainer.losses import sft_loss
from polyrl_trainer.sample import Sample

NO_GPU: Final = "gpu-check: this machine has no GPU that torch {torch} can use, so nothing was checked"
VOCABULARY: Final = 512
MODEL: Final[dict[str, Any]] = {
    "model_type": "qwen2", "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.05,
}  # fmt: skip
OPTIMIZER: Final = OptimizerConfig(learning_rate=1e-3, total_steps=100)
STEPS: Final = 10
WAIT_S: Final = 300.0
MOST_RANKS: Final = 8
HALF_TOLERANCE: Final = 3e-2
"""Of logprobs, absolute, and of losses, relative: bfloat16 has three digits."""
SAME_TOLERANCE: Final = 2e-3
"""Of losses and norms, relative: the same kernels in float32, whose sums run in another order."""


def draw(count: int, seed: int, longest: int = 200) -> list[Sample]:
    """Ragged rows, half of each learned."""
    chance = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(chance.integers(4, longest))
        mask = (np.arange(length) >= length // 2).astype(np.float32)
        rows.append(Sample(chance.integers(0, VOCABULARY, length), mask, prompt_length=length // 2))
    return rows


def packed(device: str) -> Iterator[tuple[str, float, float]]:
    """Largest differences of logprobs and of the gradient of the embedding, relative to its largest."""
    policy = create_policy(ModelConfig(MODEL, dtype="bfloat16"), EngineConfig(device))
    samples, found = draw(24, 0), []
    for attention in (DENSE_ATTENTION, PACKED_ATTENTION):
        policy.model.set_attn_implementation(attention)
        policy.model.zero_grad()
        one_row = replace(policy, packing=PackingPolicy.variable_length(8192))
        (batch,) = one_row.passes(samples)
        log_probs = one_row.outputs(batch, 1.0).log_probs
        log_probs.mean().backward()  # type: ignore[no-untyped-call]
        gradient = policy.model.get_input_embeddings().weight.grad  # type: ignore[no-untyped-call]
        found.append((log_probs.detach().float().cpu(), gradient.float().cpu().clone()))
    (dense, dense_gradient), (packed_ones, packed_gradient) = found
    yield "packed: logprobs", float((dense - packed_ones).abs().max()), HALF_TOLERANCE
    apart = float((dense_gradient - packed_gradient).abs().max() / dense_gradient.abs().max())
    yield "packed: gradient", apart, HALF_TOLERANCE


def steps_of(backend: Learner) -> list[float]:
    """Loss and gradient norm of each step."""
    seen = []
    for step in range(STEPS):
        sums = backend.forward_backward(draw(16, step), sft_loss).result(WAIT_S)
        taken = backend.optim_step(sums["tokens"]).result(WAIT_S)
        seen += [sums["loss"] / sums["tokens"], taken.grad_norm]
    return seen


def one_process(device: str, dtype: Any, offload: CpuOffload = CpuOffload.NONE) -> list[float]:
    engine = EngineConfig(device, cpu_offload=offload)
    with closing(create_torch_backend(ModelConfig(MODEL, dtype=dtype), engine, OPTIMIZER, CheckpointConfig())) as one:
        return steps_of(one)


def apart(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(one - other) / max(abs(other), 1e-6) for one, other in zip(found, wanted, strict=True))


def dtype(device: str) -> Iterator[tuple[str, float, float]]:
    half, whole = one_process(device, "bfloat16"), one_process("cpu", "float32")
    yield "dtype: losses", apart(half[::2], whole[::2]), HALF_TOLERANCE


def ranks(device: str) -> Iterator[tuple[str, float, float]]:
    there = min(MOST_RANKS, torch.cuda.device_count()) if device == "cuda" else 2
    engine = EngineConfig(device)
    for kind, tolerance in (("float32", SAME_TOLERANCE), ("bfloat16", HALF_TOLERANCE)):
        wanted = one_process(device, kind)
        for count in range(1, there + 1):
            model = ModelConfig(MODEL, dtype=kind)  # type: ignore[arg-type]
            with closing(LearnerGroup(count, device, threads=1, wait_seconds=WAIT_S)) as group:
                found = steps_of(group.learner(model, engine, OPTIMIZER))
            yield f"ranks: {count}, {kind}", apart(found, wanted), tolerance


def moments(device: str) -> Iterator[tuple[str, float, float]]:
    offload, wanted = CpuOffload.OPTIMIZER, one_process(device, "float32")
    yield "moments: one process", apart(one_process(device, "float32", offload), wanted), SAME_TOLERANCE
    with closing(LearnerGroup(1, device, threads=1, wait_seconds=WAIT_S)) as group:
        learner = group.learner(
            ModelConfig(MODEL, dtype="float32"), EngineConfig(device, cpu_offload=offload), OPTIMIZER
        )
        yield "moments: a rank", apart(steps_of(learner), wanted), SAME_TOLERANCE


def main() -> int:
    """0 where all hold, or where there is nothing to check on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU.format(torch=torch.__version__))
        return 0
    failed = False
    for check in (packed, dtype, ranks, moments, partial(hand_over, MODEL)):
        for name, found, most in check(device):
            failed |= not found <= most
            print(f"{'ok ' if found <= most else 'OFF'} {name}: {found:.2g}, at most {most:g}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
