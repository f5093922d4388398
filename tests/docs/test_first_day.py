"""A stranger's first day as one script: an empty folder and an empty home, the command line and nothing else, and no
network: in a namespace without a route, so that whatever would reach out fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 600
"""Half a minute on two idle cores."""
SCRIPT = """
test "$(wc -l </proc/net/route)" -le 1 || echo "there is a route"
polyrl init my-task
polyrl validate my-task/job.yaml
polyrl reward my-task/job.yaml --row 3 --response 227
polyrl run my-task/job.yaml --out runs/one --set spec.recipe.algorithm.steps=3
polyrl ls
polyrl samples runs/one --best --limit 1
polyrl why runs/one
polyrl check runs/one
polyrl report runs/one --out page.html
polyrl export runs/one exported
polyrl generate exported "7>"
"""


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 60)
def test_from_nothing_to_a_model_that_answers(tmp_path: Path) -> None:
    environment = {
        "HOME": str(tmp_path / "home"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        **{name: os.environ[name] for name in ("PYTHONPATH", "POLYRL_ALLOW_UNCONFINED") if name in os.environ},
    }
    (tmp_path / "home").mkdir()
    answer = subprocess.run(
        [ROOT / "tests/sglang/confine.sh", "bash", "-euo", "pipefail", "-c", SCRIPT],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    assert ("there is a route" not in answer.stdout) or "warning: no network namespace" in answer.stderr
    summary = json.loads((tmp_path / "runs/one/summary.json").read_text())
    assert summary["outcome"] == "succeeded"
    assert "my-task" in (tmp_path / "page.html").read_text()
    assert (tmp_path / "exported/model.safetensors").is_file()
