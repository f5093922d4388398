"""Runs of `polyrl run`, kept in a folder: one that is there already is read instead of made again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

RUN_LIMIT_S: Final = 3600.0
"""A run takes a minute or two on two idle cores; beside other load many times that."""


@dataclass(frozen=True)
class Run:
    """What a finished run left."""

    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found

    def steps(self) -> list[dict[str, Any]]:
        """Metrics of its RL steps, in order."""
        lines = (json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if line["phase"] == "rl"]

    def rewards(self) -> list[float]:
        """Mean reward of each RL step."""
        return [float(step["reward/mean"]) for step in self.steps()]

    @property
    def is_done(self) -> bool:
        return (self.folder / "summary.json").exists() and self.summary["outcome"] == "succeeded"


def run_job(job: Path, out: Path, seed: int, fields: Mapping[str, Any]) -> Run:
    """Runs `job` with `fields` overridden into `out`, unless it is there. Raises RuntimeError when it fails."""
    run = Run(out)
    if run.is_done:
        return run
    argv = [
        str(Path(sys.executable).with_name("polyrl")),
        "run",
        str(job),
        "--no-check",
        "--seed",
        str(seed),
        "--out",
        str(out),
    ]
    for override in overrides(fields):
        argv += ["--set", override]
    out.parent.mkdir(parents=True, exist_ok=True)
    with (out.parent / f"{out.name}.log").open("w") as log:
        subprocess.run(argv, stdout=log, stderr=log, check=False, timeout=RUN_LIMIT_S)
    if not run.is_done:
        raise RuntimeError(f"{out} did not succeed; see {log.name}")
    return run


def overrides(fields: Mapping[str, Any]) -> list[str]:
    """As `--set` reads them."""
    return [f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in fields.items()]
