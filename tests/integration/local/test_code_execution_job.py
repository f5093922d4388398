"""examples/code-execution to its end, with fewer steps: what the model writes is run by real workers, and scored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.local.job_runs import polyrl, rl_rows

JOB = Path(__file__).parents[3] / "examples" / "code-execution" / "job.yaml"
STEPS = 2
SHORTER = {
    "spec.recipe.sft.steps": 12,
    "spec.recipe.algorithm.steps": STEPS,
    "spec.recipe.evaluation.maxSamples": 16,
    "spec.rollout.replicas": 0,
}


@pytest.mark.slow
def test_programs_are_run_to_be_scored(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = polyrl("run", JOB, "--no-check", "--out", out, *(f"--set={path}={value}" for path, value in SHORTER.items()))
    assert done.returncode == 0, done.stdout + done.stderr
    steps = rl_rows(out)
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert 0 <= row["reward/mean"] <= 1
        assert 0 <= row["reward/ran"] <= 1
        assert row["reward/timed_out"] == 0
    assert json.loads((out / "summary.json").read_text())["samples"]["discarded"] == {}
    audit = polyrl("check", out)
    assert (audit.returncode, "nothing is broken" in audit.stdout) == (0, True), audit.stdout
