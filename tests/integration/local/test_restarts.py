"""Workers of a real run are killed without notice, and the run goes on: nothing lost, nothing trained twice."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from polyrl.testing.started import StartedProcess, words_of
from polyrl_cli.inspection.check import check_lines
from polyrl_cli.report.timeline import read_metrics
from tests.integration.local.job_runs import held_reward

ROOT = Path(__file__).parents[3]
JOB = ROOT / "examples" / "sort-digits" / "job.yaml"
DEADLINE_S = 500.0
POLL_S = 0.02
MANAGER, TRAINER, ROLLOUT = "polyrl_rollout.manager", "polyrl_trainer", "--exchange-bind"
"""What stands in their argv; a reserved engine exchanges no weights."""

STEPS = 10
HELD_AT = 8
"""Two steps after the last kill, so that there is work to lose at it, the run waits in case that it comes late."""

SAMPLES_PER_STEP = 64
EVERY = 4
"""Steps between two checkpoints where trainers are killed halfway."""

SMALL = {
    "spec.recipe.sft.steps": 4,
    "spec.recipe.sft.batchSize": 16,
    "spec.recipe.algorithm.steps": STEPS,
    "spec.recipe.algorithm.promptsPerStep": 8,
    "spec.recipe.algorithm.miniBatchPrompts": 4,
    "spec.recipe.algorithm.minMicroBatchSamples": 16,
    "spec.recipe.reward.timeoutSeconds": int(DEADLINE_S),
    "spec.recipe.evaluation.everySteps": 0,
    "spec.recipe.evaluation.maxSamples": 16,
    "spec.recipe.checkpoint.everySteps": 2,
    "spec.rollout.replicas": 1,
    "spec.rollout.maxReplicas": 1,
    "spec.faultInjection": "[]",
}


class Run:
    """`polyrl run` in a process of its own."""

    def __init__(self, root: Path, **changes: object) -> None:
        self.root, self.go_on = root, root.with_name("go-on")
        root.with_name("reward.py").write_text(held_reward(JOB.parent, HELD_AT, root / "metrics.jsonl", self.go_on))
        placed = {**SMALL, "spec.recipe.code.path": root.parent, **changes}
        sets = [f"--set={path}={value}" for path, value in placed.items()]
        argv = [sys.executable, "-m", "polyrl_cli.app", "run", str(JOB), "--no-check", *sets, "--out", str(root)]
        self.process = StartedProcess(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
            assert self.process.poll() is None, f"ended before {what}: {self.process.communicate()[0]}"
            time.sleep(POLL_S)

    def steps(self) -> list[int]:
        """RL steps, in the order in which they became whole."""
        metrics = self.root / "metrics.jsonl"
        return [report.step for report in read_metrics(metrics) if report.phase == "rl"]

    def kill(self, worker: str, before: Callable[[], object] = lambda: None) -> None:
        """SIGKILL to the newest process that has `worker` in its argv, once there is one. It is stopped while `before`
        is done, so that no successor comes into that."""
        self.until(lambda: self._newest(worker) is not None, f"a {worker}")
        victim = self._newest(worker)
        assert victim is not None
        victim.suspend()
        before()
        victim.kill()
        victim.wait(DEADLINE_S)

    def pause(self, worker: str, until: Callable[[], bool], what: str) -> None:
        """SIGSTOP until then."""
        paused = self._newest(worker)
        assert paused is not None
        paused.suspend()
        try:
            self.until(until, what)
        finally:
            paused.resume()

    def manager_listens(self) -> bool:
        """True when the endpoints file is that of a living manager."""
        file = self.root / "run" / "endpoints" / "manager.json"
        return file.exists() and psutil.pid_exists(json.loads(file.read_text())["pid"])

    def summary(self) -> dict[str, Any]:
        self.go_on.touch()
        output = self.process.communicate(timeout=DEADLINE_S)[0]
        assert self.process.returncode == 0, output
        summary: dict[str, Any] = json.loads((self.root / "summary.json").read_text())
        return summary

    def _newest(self, worker: str) -> psutil.Process | None:
        found = []
        for child in psutil.Process(self.process.pid).children():
            try:
                if worker in words_of(child) and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
            except psutil.Error:
                continue
        return max(found, key=lambda child: child.create_time(), default=None)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    started: list[Run] = []

    def begin(**changes: object) -> Run:
        started.append(Run(tmp_path / "run", **changes))
        return started[-1]

    yield begin
    for run in started:
        run.process.send_signal(signal.SIGKILL)
        run.process.communicate()


def every_sample_ended_once(root: Path, summary: dict[str, Any]) -> None:
    samples = summary["samples"]
    assert samples["open"] == 0
    assert samples["submitted"] == samples["acknowledged"] + sum(samples["discarded"].values())
    lines, sound = check_lines(root)
    assert sound, "\n".join(lines)


@pytest.mark.slow
def test_a_manager_killed_three_times_once_with_its_journal_costs_no_sample_and_no_step(
    start: Callable[..., Run],
) -> None:
    """A lost journal is made good from the trainer's cursor."""
    run = start()
    run.until(run.manager_listens, "a manager")
    run.kill(MANAGER)
    run.until(lambda: len(run.steps()) >= 2, "step 2")
    run.until(run.manager_listens, "a manager")
    run.kill(MANAGER)
    run.until(lambda: len(run.steps()) >= 5, "step 5")
    run.until(run.manager_listens, "a manager")
    run.kill(MANAGER, before=lambda: [file.unlink() for file in run.root.glob("journal.sqlite*")])
    summary = run.summary()
    assert summary["steps"] == {"sft": 4, "rl": STEPS}
    assert run.steps() == list(range(1, STEPS + 1))
    assert set(summary["samples"]["discarded"]) <= {"surplus"}
    every_sample_ended_once(run.root, summary)
    started = [json.loads(line).get("worker") for line in (run.root / "fleet.jsonl").read_text().splitlines()]
    assert "manager-3" in started
    assert summary["losses"] == []


@pytest.mark.slow
def test_a_trainer_killed_twice_goes_on_from_its_newest_checkpoint(start: Callable[..., Run]) -> None:
    """Its first steps are trained again, from what was generated for them."""
    run = start(**{"spec.recipe.checkpoint.everySteps": EVERY})
    for step in (3, EVERY + 3):
        run.until(lambda: len(run.steps()) >= step, f"step {step}")  # noqa: B023 - asked at once
        run.kill(TRAINER)
    summary = run.summary()
    samples = summary["samples"]
    assert samples["offeredAgain"] >= 2 * 3 * SAMPLES_PER_STEP
    generated_anew = samples["submitted"] - samples["acknowledged"]
    assert generated_anew <= 2 * SAMPLES_PER_STEP, "a kill costs at most what of one step was unfinished"
    assert summary["steps"] == {"sft": 4, "rl": STEPS}
    assert run.steps() == list(range(1, STEPS + 1)), "no step is in the file twice"
    assert set(summary["samples"]["discarded"]) <= {"stale", "groupIncomplete", "surplus"}
    every_sample_ended_once(run.root, summary)
    started = [json.loads(line).get("worker") for line in (run.root / "fleet.jsonl").read_text().splitlines()]
    assert "trainer-2" in started
    assert "manager-1" not in started


@pytest.mark.slow
def test_a_rollout_dies_while_weights_are_exchanged_and_another_joins(start: Callable[..., Run]) -> None:
    steps = 8
    changes = {"trainer.reservedEngine": "false", "recipe.algorithm.steps": steps, "rollout.weightExchange": "Always"}
    changes |= {"rollout.replicas": 2, "rollout.maxReplicas": 2, "rollout.weightDeltas": "Always"}
    changes |= {"recipe.algorithm.optimizer.learningRate": 1e-9}  # as sparse in float32 as a usual one in bfloat16
    run = start(**{f"spec.{path}": value for path, value in changes.items()})
    run.until(lambda: exchanged(run.root, 2), "both to have given and taken weights")
    seen = newest_loaded(run.root)
    # Stopped, it brings nothing of its share of the next version, and the other waits for it at first.
    run.kill(ROLLOUT, before=lambda: run.until(lambda: newest_loaded(run.root) > seen, "an update without it"))
    # Who joins while the trainer does not answer has everything from the one that is left.
    run.pause(TRAINER, lambda: exchanged(run.root, 3), "one that joined")
    summary = run.summary()
    assert run.steps() == list(range(1, steps + 1))
    every_sample_ended_once(run.root, summary)
    assert [loss["replacedAfterSeconds"] is not None for loss in summary["losses"]] == [True]
    assert '"form": "delta: the job wants them' in without_colours(run.root / "logs" / "trainer.log")


def exchanged(root: Path, rollouts: int) -> bool:
    logs = rollout_logs(root)
    return len(logs) == rollouts and all(re.search(r"from_peers=[1-9]", log) for log in logs)


def rollout_logs(root: Path) -> list[str]:
    return [without_colours(file) for file in sorted((root / "logs").glob("rollout-*.log"))]


def without_colours(log: Path) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", log.read_text())


def newest_loaded(root: Path) -> int:
    """By any rollout."""
    return max(int(found) for log in rollout_logs(root) for found in re.findall(r"loaded .*version=(\d+)", log))
