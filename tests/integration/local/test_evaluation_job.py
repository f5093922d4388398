"""A job whose evaluation sets have rewards, lengths and draws of their own, within SFT and RL, and whose responses end
with a string of two tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.integration.local.job_runs import polyrl, write_digits_job

JOB = """\
apiVersion: polyrl.dev/v1alpha1
kind: PolyRLJob
metadata:
  name: evaluated
spec:
  recipe:
    mode: sft+rl
    seed: 3
    model:
      config:
        {model_type: qwen2, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2,
         num_key_value_heads: 2}
      tokenizer: {type: characters, alphabet: "0123456789="}
      dtype: float32
    data:
      sft: [{path: sft.jsonl}]
      rl: [{path: rl.jsonl}]
      eval: [{path: rl.jsonl}]
    sft: {steps: 2, batchSize: 8}
    algorithm: {name: grpo, steps: 2, promptsPerStep: 8}
    evaluation:
      everySftSteps: 1
      everySteps: 1
      maxSamples: 6
      sampling: {samplesPerPrompt: 4}
      passReward: 100
      sets:
        - {name: first, data: [{path: rl.jsonl}], maxSamples: 4, reward: {function: "grading:first"}}
        - name: long
          data: [{path: rl.jsonl}]
          maxSamples: 3
          sampling: {samplesPerPrompt: 2, maxNewTokens: 20}
          reward: {function: "grading:score_group"}
          passReward: 20
    logging: {samples: {perStep: 1024}}
    sampling: {samplesPerPrompt: 4, maxNewTokens: 12, stop: ["00", "12", "3=", "77", "81", "94", "59"]}
    reward: {function: "reward:score"}
  rollout:
    replicas: 0
    engine: {type: embedded, maxContext: 32, kvTokens: 1024}
  trainer: {reservedEngine: true}
"""
GRADING = """\
def first(sample):
    return {"reward": 7, "answer": sample.response[:1]}


def score_group(samples):
    assert len(samples) == 2, "all samples of a prompt"
    return [{"reward": 20, "tokens": len(one.tokens) - one.prompt_length} for one in samples]
"""
STOP = ("00", "12", "3=", "77", "81", "94", "59")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_set_is_measured_by_its_own_and_each_response_ends_at_its_string(tmp_path: Path) -> None:
    manifest, run = write_digits_job(tmp_path, JOB), tmp_path / "run"
    (tmp_path / "grading.py").write_text(GRADING)
    done = polyrl("run", manifest, "--no-check", "--out", run)
    assert done.returncode == 0, done.stdout + done.stderr
    evaluations = [row for row in rows(run / "metrics.jsonl") if row["phase"] == "eval"]
    assert len(evaluations) >= 4, "within both stages"
    for row in evaluations:
        assert row["eval/first/reward"] == 7
        assert row["eval/first/avg@4"] == 1, "evaluation.passReward is of the recipe's reward"
        assert row["eval/first/maj@4"] == 1
        assert row["eval/pass@4"] == 0
        assert "eval/maj@4" not in row, "the recipe's reward names no answers"
        assert row["eval/long/reward"] == 20
        assert row["eval/long/pass@2"] == 1
        assert not [name for name in row if "answer" in name]
    assert max(row["eval/long/tokens"] for row in evaluations) > 12, "its own length"
    trained = [row for row in rows(run / "metrics.jsonl") if row["phase"] == "rl"]
    assert [row["rollout/unexplained_stop_ratio"] for row in trained] == [0, 0]
    samples = rows(run / "samples.jsonl")
    cut = [one for one in samples if one["response"][:-1] and any(text in one["response"] for text in STOP)]
    assert len(cut) > 20
    for one in cut:
        first = min(one["response"].find(text) + len(text) for text in STOP if text in one["response"])
        assert (len(one["response"]), one["finish"]) == (first, "stop")
    (generated,) = re.findall(r"([0-9,]+) generated, 0 of them again", done.stdout)
    assert int(generated.replace(",", "")) == sum(one["response_tokens"] for one in samples), "engines stopped there"
