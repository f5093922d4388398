"""A job of PPO, as a user starts it: a policy, with moments in 8 bits, and its critic learn beside each other, and both
go on after a resume."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.integration.local.job_runs import polyrl, rl_rows

STEPS, MORE_STEPS, WARMUP = 12, 16, 2
JOB = """\
apiVersion: polyrl.dev/v1alpha1
kind: PolyRLJob
metadata:
  name: ppo
spec:
  recipe:
    mode: rl
    seed: 3
    model:
      config:
        {model_type: qwen2, hidden_size: 256, intermediate_size: 512, num_hidden_layers: 1, num_attention_heads: 4,
         num_key_value_heads: 2}
      tokenizer: {type: characters, alphabet: "0123456789="}
      dtype: float32
    data:
      rl: [{path: rl.jsonl}]
    algorithm:
      name: ppo
      steps: 12
      promptsPerStep: 32
      miniBatchPrompts: 8
      updateEpochs: 2
      oldLogProbs: recompute
      critic: {warmupSteps: 2, gaeLambda: 0.95, optimizer: {learningRate: 1e-3}}
      optimizer: {name: adamw_8bit, learningRate: 1e-3}
    sampling: {samplesPerPrompt: 2, maxNewTokens: 6}
    reward: {function: "reward:score"}
    checkpoint: {everySteps: 20}
  rollout:
    replicas: 0
    engine: {type: embedded, maxContext: 16, kvTokens: 1024}
  trainer: {reservedEngine: true}
"""
REWARD = """\
def score(sample):
    return float(sample.prompt[0] < "5") + sum(one in "01234" for one in sample.response) / 6
"""


def mean_of(rows: list[dict[str, Any]], name: str) -> float:
    return float(sum(row[name] for row in rows) / len(rows))


def test_a_ppo_job_learns_and_so_does_its_critic(tmp_path: Path) -> None:
    dice = random.Random(1)
    rows = [json.dumps({"prompt": "".join(dice.choices("0123456789", k=3)) + "="}) for _ in range(64)]
    (tmp_path / "rl.jsonl").write_text("".join(f"{row}\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "job.yaml").write_text(JOB)
    run = tmp_path / "run"
    done = polyrl("run", tmp_path / "job.yaml", "--out", run)
    assert done.returncode == 0, done.stdout + done.stderr
    first = rl_rows(run)
    assert [row["actor/optimizer_steps"] for row in first] == [0] * WARMUP + [8] * (STEPS - WARMUP)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {f"rl-step-{STEPS:06d}"}

    more = JOB.replace(f"steps: {STEPS}", f"steps: {MORE_STEPS}")
    (tmp_path / "job.yaml").write_text(more.replace("name: adamw_8bit, ", ""))
    refused = polyrl("run", tmp_path / "job.yaml", "--no-check", "--resume", run)
    assert refused.returncode != 0
    assert "recipe.algorithm.optimizer.name" in refused.stderr
    (tmp_path / "job.yaml").write_text(more)
    done = polyrl("run", tmp_path / "job.yaml", "--no-check", "--resume", run)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = rl_rows(run)
    assert [row["step"] for row in steps] == list(range(1, MORE_STEPS + 1))
    assert mean_of(steps[-4:], "reward/mean") > mean_of(steps[:4], "reward/mean") + 0.1
    # The critic sees which prompts are rewarded, and after the resume it is the one that had seen it.
    assert mean_of(steps[:2], "critic/vf_explained_var") < 0.2
    assert mean_of(steps[STEPS - 2 : STEPS], "critic/vf_explained_var") > 0.4
    assert mean_of(steps[STEPS : STEPS + 2], "critic/vf_explained_var") > 0.4
    names = ("vf_loss", "vf_clipfrac", "vpred_mean", "lr", "grad_norm", "returns/max", "values/mean")
    assert all(f"critic/{name}" in row for row in steps for name in names)
    newest = run / "checkpoints" / f"rl-step-{MORE_STEPS:06d}"
    moments = {one: load_file(newest / one / "optimizer.safetensors") for one in ("model", "critic")}
    codes = {name.split("/")[1] for name, one in moments["model"].items() if one.dtype == torch.uint8}
    assert len(codes) == 7, "of a layer's matrices; the embedding is too small"
    assert not [name for name, one in moments["critic"].items() if one.dtype == torch.uint8]
