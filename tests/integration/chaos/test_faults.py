"""Jobs hit by kills and freezes at random instants: the measurement of benchmarks/faults, small, as a test.

A run fails there when what it trained differs from the undisturbed run (prompts, batches, versions, token ids, rewards,
losses), when it hangs, leaves a process or drops a group without need, or when its journal shows an invariant broken.
"""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from polyrl.testing.started import ran

FOLDER = Path(__file__).parents[3] / "benchmarks" / "faults"
DEADLINE_S = 900

pytestmark = pytest.mark.timeout(DEADLINE_S)


def inject(out: Path, *options: str) -> str:
    """What a series says in which every run was equal to the undisturbed one."""
    argv = [sys.executable, "-m", "polyrl.testing.script", str(FOLDER / "run.py"), *options, "--out", str(out / "runs")]
    run = ran(argv, timeout_s=DEADLINE_S)
    print(run.stdout, run.stderr)
    assert run.returncode == 0
    return run.stdout


def test_jobs_with_random_faults_train_what_the_undisturbed_one_does(tmp_path: Path, seed: int) -> None:
    output = inject(tmp_path, "--runs", "2", "--seed", str(seed))
    assert "hashed: 2 of 2 runs equal, 96 samples compared" in output


def test_generated_ahead_of_training_each_token_is_its_versions_whatever_is_killed(tmp_path: Path, seed: int) -> None:
    """While it starts by somebody else's hand, and by power cuts."""
    output = inject(tmp_path, "--runs", "2", "--harder", "--ahead", "1", "--seed", str(seed))
    assert "hashed: 2 of 2 runs equal, 96 samples compared" in output


@pytest.mark.slow
def test_training_with_faults_equals_training_without(tmp_path: Path) -> None:
    """The trainer itself on embedded engines: agent, manager and trainer killed in the midst of it."""
    faults = ("kill:agent:0.1", "kill:manager:0.25", "kill:trainer:0.4")
    output = inject(tmp_path, "--runs", "1", "--real-every", "1", *(f"--fault={fault}" for fault in faults))
    assert "real: 1 of 1 runs equal, 96 samples compared, 0 of them by several versions, 1 runs hit by " in output, (
        "a quick job may be over before the last"
    )


def test_a_process_that_outlives_its_run_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    one_run = importlib.import_module("one_run")
    monkeypatch.setattr(one_run, "GONE_S", 0.1)
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "log").open("wb") as log:
        sleeper = subprocess.Popen(["sleep", "60"], stderr=log)
    try:
        assert [str(sleeper.pid) in orphan for orphan in one_run.orphans(tmp_path / "run")] == [True]
        assert list(one_run.orphans(tmp_path / "another run")) == []
    finally:
        sleeper.kill()
        sleeper.wait()


def test_generated_ahead_a_token_of_another_version_is_noticed(outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = importlib.import_module("computed")
    got, key = computed.hashed_outcome(1), ("6", 0)
    assert got.steps[2][key].versions[0] == 1
    length = len(got.steps[2][key].ids)
    for versions in ((0,) + (1,) * (length - 1), (1,) + (0,) * (length - 1), (2,) * length, (1,) * (length - 1)):
        other = copy.deepcopy(got)
        other.steps[2][key] = msgspec.structs.replace(got.steps[2][key], versions=versions)
        (difference,) = outcome.differences(other, computed.hashed_outcome(1, other))
        assert "samples differ" in difference


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("outcome")


@pytest.fixture
def trained(outcome: Any, tmp_path: Path) -> Any:
    """Two steps of two prompts and two samples."""
    lines = []
    for step in (1, 2):
        row = [(step, f"p{step}{prompt}", index, (5, 6, 7), (step - 1,), 1.0) for prompt in "ab" for index in (0, 1)]
        lines.append(msgspec.json.encode(row) + b"\n")
    (tmp_path / outcome.TRAINED).write_bytes(b"".join(lines))
    losses = [{"step": step, **dict.fromkeys(outcome.LOSSES, 0.5)} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in losses))
    return outcome.read_outcome(tmp_path)


def test_an_equal_outcome_is_equal(outcome: Any, trained: Any) -> None:
    assert trained.samples == 8
    assert list(outcome.differences(copy.deepcopy(trained), trained)) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"ids": (5, 6, 8)}, "samples differ"), ({"versions": (0, 1)}, "samples differ"), ({"reward": 0.0}, "differ")],
    ids=["other tokens", "other versions", "another reward"],
)
def test_one_sample_that_differs_is_noticed(outcome: Any, trained: Any, change: dict[str, Any], sentence: str) -> None:
    other = copy.deepcopy(trained)
    key = ("p2a", 1)
    other.steps[2][key] = msgspec.structs.replace(other.steps[2][key], **change)
    (difference,) = outcome.differences(other, trained)
    assert sentence in difference


def test_a_step_with_another_prompt_is_noticed(outcome: Any, trained: Any) -> None:
    other = copy.deepcopy(trained)
    other.steps[1]["p2a", 0] = other.steps[1].pop(("p1a", 0))
    (difference,) = outcome.differences(other, trained)
    assert "wrong prompts" in difference


def test_a_step_or_a_loss_that_differs_is_noticed(outcome: Any, trained: Any) -> None:
    other = copy.deepcopy(trained)
    other.losses[1]["actor/pg_loss"] *= 1 + 10 * outcome.TOLERANCE
    del other.steps[2]
    steps, loss = outcome.differences(other, trained)
    assert "steps [1]" in steps
    assert "actor/pg_loss" in loss


def test_a_step_that_was_trained_twice_in_two_ways_is_noticed(outcome: Any, trained: Any, tmp_path: Path) -> None:
    with (tmp_path / outcome.TRAINED).open("ab") as file:
        file.write(msgspec.json.encode([(1, "p1a", 0, (5, 6, 9), (0,), 1.0)]) + b"\n")
    (difference,) = outcome.differences(outcome.read_outcome(tmp_path), trained)
    assert "trained twice" in difference
