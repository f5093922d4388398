"""The folder of a long run whose every text is hostile: as a received one may be."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

HOSTILE = "\x1b[2J$\\no{$</svg><script>document.title = 'taken'</script><img src=x onerror=alert()></pre>{{ 7*7 }}"
BEGAN = 1_700_000_000.0


def _rows(steps: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = [{"time": BEGAN + 5, "phase": "eval", "step": 0, "eval/reward": 0.1}]
    for step in range(1, steps + 1):
        timing = {f"timing_s/{part}": 0.1 for part in ("train", "wait", "update_weights", "other", "gen")}
        values = {"reward/mean": step / steps, "response_length/mean": 5.0, "response_length/max": 9.0, HOSTILE: 1.0}
        rows.append({"time": BEGAN + 10 + step, "phase": "rl", "step": step, "timing_s/step": 0.4, **timing, **values})
    rows.append(
        {"time": BEGAN + 11 + steps, "phase": "eval", "step": steps, "eval/reward": 0.9, "eval/" + HOSTILE: 1.0}
    )
    return rows


def _events() -> list[dict[str, object]]:
    def event(t: float, kind: str, worker: str) -> dict[str, object]:
        return {"time": BEGAN + t, "t": t, "event": kind, "worker": worker, "text": f"{worker} {kind}"}

    lost, other = "rollout-" + HOSTILE, "rollout-1"
    return [
        event(0, "started", "manager"), event(1, "started", lost), event(2, "started", other),
        event(6, "serving", lost),
        event(7, "serving", other), event(20, "reclaimed", lost), event(21, "exited", lost),
        event(30, "serving", "rollout-2"),
    ]  # fmt: skip


def _samples() -> list[dict[str, object]]:
    shared = {"time": BEGAN, "stage": "rl", "metrics": {HOSTILE: 1.0}, "finish": "stop", "versions": [1]}
    sizes = {"prompt_tokens": 1, "response_tokens": 1, "prompt": HOSTILE, "response": HOSTILE, "reward": 0.5}
    train = {"purpose": "train", "step": 3, "sample": "7.0", "group": 7, "chosen": ["best"]}
    return [shared | sizes | train, shared | sizes | {"purpose": "eval", "step": 3, "sample": "8.0", "group": 8}]


@pytest.fixture
def made_run(tmp_path: Path) -> Callable[[int], Path]:
    """Makes a run of so many steps, and returns its folder."""

    def make(steps: int) -> Path:
        folder = tmp_path / "runs" / "made"
        folder.mkdir(parents=True)
        for name, rows in (("metrics", _rows(steps)), ("fleet", _events()), ("samples", _samples())):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, "\udcff", 7, {}]))
        job = {"kind": "PolyRLJob", "metadata": {"name": HOSTILE}, "spec": {"recipe": {"mode": "sft+rl"}}}
        (folder / "job.json").write_text(json.dumps(job))
        end = {"outcome": "failed", "cause": HOSTILE, "seed": HOSTILE, "wallSeconds": 40.0}
        (folder / "summary.json").write_text(json.dumps(end))
        return folder

    return make
