"""Small jobs as a user starts them: the command, prompts of digits that a copy answers, and rows of metrics."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from polyrl.testing.started import ran

DEADLINE_S = 500
HELD = """

import time
from pathlib import Path

metrics, go_on = Path({metrics!r}), Path({go_on!r})

def score(sample):
    while not go_on.exists() and metrics.exists() and metrics.read_text().count('"phase": "rl"') >= {step}:
        time.sleep(0.05)
    return exact(sample)
"""
SMALL_DIGITS = "def score(sample):\n    return sum(one in '01234' for one in sample.response) / 6\n"
"""A reward that a model learns which was taught to copy."""


def command(*words: object) -> list[str]:
    """The argv of `polyrl` with these words."""
    return [sys.executable, "-m", "polyrl_cli.app", *map(str, words)]


def environment(**more: str) -> dict[str, str]:
    """This process's, without the Hub."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", **more}


def polyrl(*words: object, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """A whole run of `polyrl`; `more`: variables of its environment."""
    return ran(command(*words), timeout_s=DEADLINE_S, cwd=cwd, env=environment(**more))


def write_digits_job(folder: Path, job: str) -> Path:
    """The manifest with its rows and its reward beside it."""
    dice = random.Random(1)
    digits = ["".join(dice.choices("0123456789", k=3)) for _ in range(32)]
    (folder / "rl.jsonl").write_text("".join(json.dumps({"prompt": f"{text}="}) + "\n" for text in digits))
    rows = [{"prompt": f"{text}=", "response": text * 2} for text in digits]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(SMALL_DIGITS)
    (folder / "job.yaml").write_text(job)
    return folder / "job.yaml"


def held_reward(example: Path, step: int, metrics: Path, go_on: Path) -> str:
    """The reward of an example in a run that waits after this RL step, however fast it is, until `go_on` is there; the
    job is to give it the time. So it outlasts what is done to it by few steps. `metrics`: the run's file."""
    own = (example / "reward.py").read_text().replace("def score(", "def exact(")
    return own + HELD.format(step=step, metrics=str(metrics), go_on=str(go_on))


def rl_rows(run: Path) -> list[dict[str, Any]]:
    """Metrics of the RL steps so far."""
    if not (run / "metrics.jsonl").is_file():
        return []
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["phase"] == "rl"]
