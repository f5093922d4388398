"""A short run seen and hit from outside while it lives, and seen again afterwards: why, explain, check, chaos."""

from __future__ import annotations

import re
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from polyrl.control import parse_endpoints
from polyrl.keys import OperatorKeys, read_keys
from polyrl.testing.started import StartedProcess
from polyrl_cli.app import USER_ERROR, app
from polyrl_cli.report.timeline import read_metrics

JOB = Path(__file__).parents[3] / "examples" / "sort-digits" / "job.yaml"
DEADLINE_S = 500
POLL_S = 0.2
STEPS = 16
SAMPLES_PER_STEP = 64
LAST_STEPS = 3
"""They wait until all has been done to the run, which would else be over by then on a crowded machine."""

PACED = """
import time
from pathlib import Path

all_done, calls = Path({all_done!r}), 0

def score(sample):
    global calls
    calls += 1
    if not all_done.exists():
        time.sleep({pace_s})
    while calls > {held_from} and not all_done.exists():
        time.sleep({poll_s})
    return exact(sample)
"""
"""The example's reward; a step takes a second and no more computing until all has been done to the run."""

SMALL = {
    "spec.recipe.sft.steps": 2,
    "spec.recipe.sft.batchSize": 16,
    "spec.recipe.algorithm.steps": STEPS,
    "spec.recipe.algorithm.promptsPerStep": 8,
    "spec.recipe.algorithm.miniBatchPrompts": 8,
    "spec.recipe.algorithm.minMicroBatchSamples": 16,
    "spec.recipe.reward.workers": 1,
    "spec.recipe.reward.timeoutSeconds": DEADLINE_S,
    "spec.recipe.evaluation.maxSamples": 16,
    "spec.rollout.replicas": 1,
    "spec.rollout.maxReplicas": 1,
    "spec.faultInjection": "[]",
    "spec.pricing.spotPerHour": 100,
    "spec.pricing.currency": "EUR",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 60)]


class LiveRun:
    """`polyrl run`, and the commands that look at it."""

    def __init__(self, folder: Path) -> None:
        self.out, self.all_done = folder / "run", folder / "all-done"
        held_from = (STEPS - LAST_STEPS) * SAMPLES_PER_STEP
        paced = PACED.format(
            pace_s=1 / SAMPLES_PER_STEP, held_from=held_from, all_done=str(self.all_done), poll_s=POLL_S
        )
        own = JOB.with_name("reward.py").read_text().replace("def score(", "def exact(")
        (folder / "reward.py").write_text(own + paced)
        sets = [f"--set={path}={value}" for path, value in {**SMALL, "spec.recipe.code.path": folder}.items()]
        argv = [sys.executable, "-m", "polyrl_cli.app", "run", str(JOB), "--no-check", *sets, "--out", str(self.out)]
        self.process = StartedProcess(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ask(self, command: str, *more: str) -> Result:
        return CliRunner().invoke(app, [command, str(self.out), *more], catch_exceptions=False)

    def manager(self, path: str) -> str:
        """What its manager answers now."""
        found = parse_endpoints((self.out / "run/endpoints/manager.json").read_bytes(), "endpoints")
        token = read_keys(OperatorKeys, self.out / "keys/operator.key").http_token
        request = urllib.request.Request(found.http + path, headers={"Authorization": f"Bearer {token}"})
        tls = ssl.create_default_context(cafile=self.out / "keys/ca.crt")
        tls.check_hostname = False  # it listens on an address
        with urllib.request.urlopen(request, timeout=DEADLINE_S, context=tls) as answer:
            text: str = answer.read().decode()
        return text

    def chaos(self, action: str, *more: str) -> str:
        done = CliRunner().invoke(app, ["chaos", action, str(self.out), *more], catch_exceptions=False)
        assert done.exit_code == 0, done.stderr
        return done.stdout

    def may_freeze_engine(self) -> bool:
        """Freezes it, unless another fault still lasts there: nothing announces its end."""
        done = CliRunner().invoke(app, ["chaos", "freeze", str(self.out), "--role=engine", "--for=1"])
        assert done.exit_code == 0 or "another fault lasts there" in done.stderr, done.stderr
        return done.exit_code == 0

    def may_ask(self, path: str) -> str:
        """The same; nothing while no manager listens."""
        try:
            return self.manager(path)
        except OSError:
            return ""

    def events(self) -> str:
        file = self.out / "fleet.jsonl"
        return file.read_text() if file.exists() else ""

    def steps(self) -> int:
        file = self.out / "metrics.jsonl"
        return sum(report.phase == "rl" for report in read_metrics(file))

    def wait(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < deadline, f"no {what}: {self.events()}"
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(POLL_S)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LiveRun]:
    live = LiveRun(tmp_path)
    yield live
    live.process.terminate()
    live.process.communicate(timeout=DEADLINE_S)


def test_a_run_is_seen_and_hit_while_it_lives_and_seen_again_when_it_is_over(run: LiveRun) -> None:
    run.wait(lambda: run.steps() >= 1 and "rollout-0 serves" in run.events(), "RL step beside a rollout")
    assert "the manager says" in run.ask("why").stdout
    assert run.ask("check").stdout.endswith("nothing is broken\n")
    seen = run.ask("top").stdout
    assert re.search(rf"RL .*[1-9]\d*/{STEPS} .*reward", seen), seen
    assert re.search("rollout-0.* running", seen), seen
    assert re.search(r"cost +\d+\.\d\d EUR \(spot ", seen), seen
    served, numbers = run.manager("/v1/page"), run.manager("/metrics")
    assert "Where a step&#39;s time goes" in served
    assert "sample 0.0" in served or "evaluation after" in served
    for number in ("polyrl_reward ", 'polyrl_steps{stage="rl"} ', 'polyrl_cost_total{currency="EUR",pool="spot"} '):
        assert number in numbers, numbers
    page = run.ask("report").stdout.strip().removeprefix("The page lies in ")
    assert 'http-equiv="refresh"' in Path(page).read_text()
    assert "sample 0.0, submitted " in run.ask("explain", "0.0").stdout

    assert re.search(
        r"rollout-0 cut off from the manager for 1 s \(seed 5\)", run.chaos("partition", "--for=1", "--seed=5")
    )
    run.wait(lambda: "rollout-0 cut off" in run.events(), "partition")
    run.wait(lambda: run.may_freeze_engine(), "end of the partition")
    time.sleep(1.5)
    assert "rollout-0 killed without notice" in run.chaos("kill")
    run.wait(lambda: "start rollout-1" in run.events(), "replacement")
    refused = CliRunner().invoke(app, ["chaos", "kill", str(run.out), "--worker=rollout-0"])
    assert refused.exit_code == USER_ERROR
    assert "does not have a live rollout called rollout-0 now" in refused.stderr
    assert "manager killed without notice" in run.chaos("kill", "--role=manager")
    run.wait(lambda: "start manager-1" in run.events(), "another manager")

    run.wait(lambda: '"resumed":true' in run.may_ask("/v1/history"), "manager that says that it was started again")

    run.all_done.touch()
    output = run.process.communicate(timeout=DEADLINE_S)[0]
    assert run.process.returncode == 0, output
    check_afterwards(run)


def check_afterwards(run: LiveRun) -> None:
    checked = run.ask("check")
    assert checked.exit_code == 0, checked.stdout
    assert run.steps() == STEPS
    assert "the run is over and ended well" in run.ask("why").stdout
    assert f"{STEPS}/{STEPS}" in run.ask("top").stdout
    trained = run.ask("explain", "20.0").stdout
    assert "is acknowledged" in trained
    refused = CliRunner().invoke(app, ["chaos", "kill", str(run.out)])
    assert refused.exit_code == USER_ERROR
    assert "no `polyrl run` is at work there" in refused.stderr
