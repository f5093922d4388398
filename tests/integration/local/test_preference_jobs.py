"""Jobs that learn from pairs of answers, as a user starts them: rows in, a checked manifest, a model out."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.integration.local.job_runs import polyrl

STEPS = 12
JOB = """\
apiVersion: polyrl.dev/v1alpha1
kind: PolyRLJob
metadata:
  name: preferences
spec:
  recipe:
    mode: MODE
    seed: 3
    model:
      config:
        {model_type: qwen2, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2,
         num_key_value_heads: 2}
      tokenizer: {type: characters, alphabet: "0123456789="}
      dtype: float32
    data:
      preferences: [{path: pairs.jsonl}]
    dpo: {steps: 12, batchSize: 16, optimizer: {learningRate: 5e-3}}
    rewardModel: {steps: 12, batchSize: 16, centerRewardsCoefficient: 0.01, optimizer: {learningRate: 5e-3}}
"""


def job(folder: Path, mode: str) -> Path:
    """Digits that were copied were preferred to digits backwards."""
    dice = random.Random(1)
    digits = ["".join(dice.sample("012345678", k=dice.randint(2, 4))) for _ in range(64)]
    rows = [{"prompt": f"{text}=", "chosen": text, "rejected": f"{text[::-1]}9"} for text in digits]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "job.yaml").write_text(JOB.replace("MODE", mode))
    return folder / "job.yaml"


def run(folder: Path, mode: str) -> list[dict[str, Any]]:
    """Rows of the metrics of a finished run in `folder`/run."""
    done = polyrl("run", job(folder, mode), "--out", folder / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["outcome"] == "succeeded"
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["phase"] == mode] == list(range(1, STEPS + 1))
    return rows


def test_a_dpo_job_runs_to_its_end(tmp_path: Path) -> None:
    rows = run(tmp_path, "dpo")
    assert rows[-1]["rewards/accuracies"] > 0.9
    assert rows[-1]["rewards/margins"] > rows[0]["rewards/margins"]
    card = (tmp_path / "run" / "checkpoints" / f"dpo-step-{STEPS:06d}" / "model" / "README.md").read_text()
    assert "DPO (sigmoid, beta 0.1): 12 steps of 16 pairs, learning rate 0.005" in card


def test_a_reward_models_job_gives_a_model_that_transformers_loads_with_its_tokenizer(tmp_path: Path) -> None:
    rows = run(tmp_path, "reward-model")
    assert rows[-1]["accuracy"] > 0.9
    folder = tmp_path / "run" / "checkpoints" / f"reward-model-step-{STEPS:06d}" / "model"
    assert "pipeline_tag: text-classification" in (folder / "README.md").read_text()
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    scores = []
    for answer in ("1234", "43219"):
        # As the card says.
        inputs = tokenizer("1234=" + answer + tokenizer.eos_token, return_tensors="pt")
        with torch.no_grad():
            scores.append(model(**inputs).logits[0, 0].item())
    assert scores[0] > scores[1], "it prefers the copy"


def test_validate_reads_every_pair_and_names_the_bad_ones(tmp_path: Path) -> None:
    manifest = job(tmp_path, "reward-model")
    with (tmp_path / "pairs.jsonl").open("a") as rows:
        rows.write('{"prompt": "1=", "chosen": "1"}\n{"prompt": "1=", "chosen": "1", "rejected": "1"}\n')
    refused = polyrl("validate", manifest)
    assert refused.returncode == 2
    assert "pairs.jsonl:65: field `rejected` is missing; the row has `prompt`, `chosen`" in refused.stderr
    assert "pairs.jsonl:66: fields `chosen` and `rejected` are the same" in refused.stderr
