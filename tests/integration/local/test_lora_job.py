"""A job that learns by adapters, as a user starts it: SFT, then RL against the model below them, then more of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from tests.integration.local.job_runs import polyrl, rl_rows, write_digits_job

STEPS, MORE_STEPS = 8, 12
JOB = """\
apiVersion: polyrl.dev/v1alpha1
kind: PolyRLJob
metadata:
  name: adapters
spec:
  recipe:
    mode: sft+rl
    seed: 3
    model:
      config:
        {model_type: qwen2, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2,
         num_key_value_heads: 2, initializer_range: 0.2}
      tokenizer: {type: characters, alphabet: "0123456789="}
      dtype: float32
      lora: {rank: 8, alpha: 16}
    data:
      sft: [{path: sft.jsonl}]
      rl: [{path: rl.jsonl}]
    sft: {steps: 10, batchSize: 16, optimizer: {learningRate: 1e-2}}
    algorithm:
      steps: 8
      promptsPerStep: 32
      miniBatchPrompts: 8
      klCoefficient: 0.001
      optimizer: {learningRate: 1e-2}
    sampling: {samplesPerPrompt: 4, maxNewTokens: 6}
    reward: {function: "reward:score"}
  rollout:
    replicas: 0
    engine: {type: embedded, maxContext: 16, kvTokens: 1024}
  trainer: {reservedEngine: true}
"""


def test_a_job_of_adapters_learns_serves_what_it_learned_and_goes_on(tmp_path: Path) -> None:
    job, run = write_digits_job(tmp_path, JOB), tmp_path / "run"
    done = polyrl("run", job, "--no-check", "--out", run)
    assert done.returncode == 0, done.stdout + done.stderr
    job.write_text(JOB.replace(f"steps: {STEPS}", f"steps: {MORE_STEPS}"))
    done = polyrl("run", job, "--no-check", "--resume", run)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = rl_rows(run)
    assert [row["step"] for row in steps] == list(range(1, MORE_STEPS + 1))
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.1
    # Engines have the merged weights: they report what the learner computes with its adapters.
    assert max(row["rollout_corr/k3_kl"] for row in steps) < 1e-6
    # The reference stays where RL began, after the resume too.
    assert steps[0]["actor/kl_loss"] < 0.2 < steps[STEPS]["actor/kl_loss"]

    checkpoints = run / "checkpoints"
    first, last = (checkpoints / name / "model" for name in ("sft-step-000010", f"rl-step-{MORE_STEPS:06d}"))
    AutoModelForCausalLM.from_pretrained(last)
    began, ended = (load_file(folder / "model.safetensors") for folder in (first, last))
    moved = {name for name in began if not np.array_equal(began[name], ended[name])}
    assert len(moved) == 7
    assert all(name.endswith("_proj.weight") for name in moved)
    adapter = json.loads((last / "adapter" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (8, 16)
