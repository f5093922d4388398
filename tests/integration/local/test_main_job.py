"""`make run`, as a reader would: the whole example, its learning, its losses, its ledger and its files.

Rollouts give each other weights here, too, which a local run leaves out: two die, and two join.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from polyrl_cli.inspection.explain import explain_lines

ROOT = Path(__file__).parents[3]
DEADLINE_S = 900
"""Three times what the job may take on two idle cores; tests run beside others."""


@pytest.mark.timeout(DEADLINE_S + 60)
def test_make_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(
        ["make", "run", f"ARGS=--seed 1 --out {out} --set spec.rollout.weightExchange=Always"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    summary = json.loads((out / "summary.json").read_text())
    assert "succeeded" in done.stdout
    learned(summary)
    nothing_lost(summary)
    weights_were_exchanged(out)
    for name in ("metrics.jsonl", "fleet.jsonl", "trainer-result.json", "run.png", "checkpoints", "tensorboard"):
        assert (out / name).exists(), name
    assert (out / "run.png").read_bytes().startswith(b"\x89PNG")
    the_sample_that_the_readme_names_is_there(out)


def the_sample_that_the_readme_names_is_there(out: Path) -> None:
    named = re.search(r"`polyrl explain RUN (\S+)`", (ROOT / "README.md").read_text())
    assert named is not None
    explained = explain_lines(out, named.group(1))
    assert any("(train)" in line for line in explained), explained


def learned(summary: dict[str, dict[str, float]]) -> None:
    exact = summary["exactMatch"]
    assert exact["base"] <= 0.05
    assert 0.2 <= exact["afterSft"] <= 0.70
    assert exact["afterRl"] >= 0.85
    assert summary["steps"] == {"sft": 40, "rl": 120}


def weights_were_exchanged(out: Path) -> None:
    """By those that began, and by those that joined."""
    logs = sorted((out / "logs").glob("rollout-*.log"))
    assert len(logs) == 4
    assert all(re.search(r"from_peers=[1-9]", re.sub(r"\x1b\[[\d;]*m", "", log.read_text())) for log in logs)


def nothing_lost(summary: dict) -> None:
    samples, tokens = summary["samples"], summary["tokens"]
    assert summary["preemptions"] == 2
    assert all(loss["replacedAfterSeconds"] is not None for loss in summary["losses"])
    assert samples["submitted"] == samples["acknowledged"] + sum(samples["discarded"].values())
    assert samples["open"] == 0
    # 120 steps of 32 prompts with 8 samples, and evaluations of 512: before, between, after, and at 25, 50, 75 and 100
    assert samples["acknowledged"] >= 120 * 32 * 8 + 7 * 512
    assert tokens["generated"] == tokens["kept"] + tokens["regenerated"]
    assert tokens["kept"] / tokens["generated"] >= 0.98
    assert 0 < summary["bytesPerToken"] <= 16
    assert summary["stepTimeRatio"] >= 0.9
