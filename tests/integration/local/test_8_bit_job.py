"""A job whose optimizer has its moments in 8 bits, as a user starts it: SFT, then GRPO, then more of it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.integration.local.job_runs import polyrl, rl_rows, write_digits_job

STEPS, MORE_STEPS = 6, 8
JOB = """\
apiVersion: polyrl.dev/v1alpha1
kind: PolyRLJob
metadata:
  name: eight-bits
spec:
  recipe:
    mode: sft+rl
    seed: 3
    model:
      config:
        {model_type: qwen2, hidden_size: 256, intermediate_size: 512, num_hidden_layers: 1, num_attention_heads: 4,
         num_key_value_heads: 2, initializer_range: 0.05}
      tokenizer: {type: characters, alphabet: "0123456789="}
      dtype: float32
    data:
      sft: [{path: sft.jsonl}]
      rl: [{path: rl.jsonl}]
    sft: {steps: 8, batchSize: 16, optimizer: {name: adamw_8bit, learningRate: 1e-3}}
    algorithm:
      name: grpo
      steps: 6
      promptsPerStep: 16
      miniBatchPrompts: 8
      optimizer: {name: adamw_8bit, learningRate: 1e-3}
    sampling: {samplesPerPrompt: 4, maxNewTokens: 6}
    reward: {function: "reward:score"}
  rollout:
    replicas: 0
    engine: {type: embedded, maxContext: 16, kvTokens: 1024}
  trainer: {reservedEngine: true}
"""


def test_a_job_with_moments_in_8_bits_learns_and_goes_on(tmp_path: Path) -> None:
    job, run = write_digits_job(tmp_path, JOB), tmp_path / "run"
    done = polyrl("run", job, "--out", run)
    assert done.returncode == 0, done.stdout + done.stderr
    more = JOB.replace(f"steps: {STEPS}", f"steps: {MORE_STEPS}")
    job.write_text(more.replace("{name: adamw_8bit, learningRate: 1e-3}\n    sampling", "{}\n    sampling"))
    refused = polyrl("run", job, "--no-check", "--resume", run)
    assert refused.returncode != 0
    assert "recipe.algorithm.optimizer.name" in refused.stderr
    job.write_text(more)
    done = polyrl("run", job, "--no-check", "--resume", run)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = rl_rows(run)
    assert [row["step"] for row in steps] == list(range(1, MORE_STEPS + 1))
    assert max(row["reward/mean"] for row in steps[-3:]) > steps[0]["reward/mean"] + 0.05
    state = load_file(run / "checkpoints" / f"rl-step-{MORE_STEPS:06d}" / "model" / "optimizer.safetensors")
    codes = {name.split("/")[1] for name, one in state.items() if one.dtype == torch.uint8}
    assert len(codes) == 7, "of a layer's matrices; the embedding is too small"
