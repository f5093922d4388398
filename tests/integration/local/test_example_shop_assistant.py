"""examples/shop-assistant, shorter: SFT makes a guesser, reward makes it ask, each turn with an advantage of its own,
while an engine dies between turns."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from polyrl_cli.report.timeline import read_metrics
from tests.integration.local.job_runs import polyrl

JOB = Path(__file__).parents[3] / "examples" / "shop-assistant" / "job.yaml"
DEADLINE_S = 500
STEPS = 7
SHORTER = {
    "spec.recipe.sft.steps": 150,
    "spec.recipe.algorithm.steps": STEPS,
    "spec.recipe.algorithm.optimizer.schedule": "constant",
    "spec.recipe.algorithm.advantage": "turnNorm",
    "spec.recipe.evaluation.everySteps": 0,
    "spec.recipe.evaluation.maxSamples": 32,
    "spec.rollout.replicas": 1,
    "spec.rollout.maxReplicas": 1,
    "spec.faultInjection": "[{atStep: 3, action: Kill, rollout: 0}]",
}


@pytest.mark.slow
def test_the_reward_teaches_to_ask_the_tool(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = polyrl("run", JOB, "--no-check", "--out", out, *(f"--set={path}={value}" for path, value in SHORTER.items()))
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [report.values for report in read_metrics(out / "metrics.jsonl") if report.phase == "rl"]
    assert len(steps) == STEPS
    asked, reward = ([step[name] for step in steps] for name in ("reward/asked", "reward/mean"))
    assert fmean(asked[:2]) < 0.5, "SFT has not made a guesser"
    assert fmean(asked[-2:]) > fmean(asked[:2]) + 0.15
    assert fmean(reward[-2:]) > fmean(reward[:2]) + 0.15
    summary = json.loads((out / "summary.json").read_text())
    assert ["killed without notice at step 3" in loss["text"] for loss in summary["losses"]] == [True]
    assert summary["samples"]["discarded"] == {}
    audit = polyrl("check", out)
    assert (audit.returncode, "nothing is broken" in audit.stdout) == (0, True), audit.stdout


def test_reward_says_that_it_plays_no_environment() -> None:
    done = polyrl("reward", JOB, "--response", "~42")
    assert done.returncode == 0, done.stderr
    assert "note: the environment is not played" in done.stdout
