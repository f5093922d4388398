"""`polyrl run` with its real trainer, engines and manager, on a job small enough for a test."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polyrl.sample_record import SAMPLES, parse_records
from polyrl.testing.started import StartedProcess, ran
from polyrl_cli.report.timeline import read_metrics
from tests.integration.local.job_runs import held_reward

ROOT = Path(__file__).parents[3]
JOB = ROOT / "examples" / "sort-digits" / "job.yaml"
DEADLINE_S = 500
POLL_S = 0.2
LONG_STEPS, HELD_AT = 8, 5
"""Where it waits for the interrupt that is to come after the second step, in case that it comes late."""

SMALL = {
    "spec.recipe.sft.steps": 2,
    "spec.recipe.sft.batchSize": 16,
    "spec.recipe.algorithm.steps": 4,
    "spec.recipe.algorithm.promptsPerStep": 8,
    "spec.recipe.algorithm.miniBatchPrompts": 8,
    "spec.recipe.algorithm.minMicroBatchSamples": 16,
    "spec.recipe.evaluation.maxSamples": 16,
    "spec.recipe.checkpoint.everySteps": 1,
    "spec.rollout.replicas": 1,
    "spec.rollout.maxReplicas": 1,
    "spec.faultInjection": "[]",
}


def command(out: Path, resume: bool = False, **changes: object) -> list[str]:
    sets = [f"--set={path}={value}" for path, value in {**SMALL, **changes}.items()]
    what = ["resume", str(out)] if resume else ["run", str(JOB), "--no-check", "--out", str(out)]
    return [sys.executable, "-m", "polyrl_cli.app", *what, *sets]


def run(out: Path, resume: bool = False, **changes: object) -> subprocess.CompletedProcess[str]:
    return ran(command(out, resume, **changes), timeout_s=DEADLINE_S)


def summary_of(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


def steps_of(out: Path, phase: str) -> list[int]:
    return [report.step for report in read_metrics(out / "metrics.jsonl") if report.phase == phase]


@pytest.mark.slow
def test_interrupted_and_resumed(tmp_path: Path) -> None:
    out, go_on = tmp_path / "run", tmp_path / "go-on"
    (tmp_path / "reward.py").write_text(held_reward(JOB.parent, HELD_AT, out / "metrics.jsonl", go_on))
    long = {
        "spec.recipe.algorithm.steps": LONG_STEPS,
        "spec.recipe.code.path": tmp_path,
        "spec.recipe.reward.timeoutSeconds": DEADLINE_S,
    }
    first = StartedProcess(command(out, **long), stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + DEADLINE_S
    while len(steps_of(out, "rl")) < 2:
        assert time.monotonic() < deadline, "no RL step came"
        assert first.poll() is None
        time.sleep(POLL_S)
    first.send_signal(signal.SIGINT)
    go_on.touch()
    printed, _ = first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 130
    assert f"polyrl resume {out} goes on from rl-step-0000" in printed
    assert summary_of(out)["outcome"] == "interrupted"
    reached = summary_of(out)["steps"]["rl"]
    refused = run(out, resume=True, **long, **{"spec.recipe.model.config.hidden_size": 64})
    assert refused.returncode == 2
    assert refused.stderr.startswith("--set spec.recipe.model.config.hidden_size: was 128 when the run began, 64 now")
    done = run(out, resume=True, **long)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (summary_of(out)["epoch"], summary_of(out)["steps"]["rl"]) == (2, LONG_STEPS)
    assert json.loads((out / "summary-of-epoch-1.json").read_text())["outcome"] == "interrupted"
    assert (out / "logs-of-epoch-1" / "trainer.log").is_file()
    assert 2 <= reached < LONG_STEPS
    assert steps_of(out, "rl") == list(range(1, LONG_STEPS + 1))
    kept = [(row.moment, row.sample) for row in parse_records((out / SAMPLES).read_bytes().splitlines())]
    assert len(set(kept)) == len(kept)
    assert list(dict.fromkeys(step for (why, _, step), _ in kept if why == "train")) == steps_of(out, "rl")


@pytest.mark.slow
def test_sft_alone_starts_nothing_but_the_trainer(tmp_path: Path) -> None:
    out = tmp_path / "run"
    unevaluated = {"spec.recipe.data.eval": "[]", "spec.recipe.evaluation.everySteps": "0"}
    done = run(out, **{"spec.recipe.mode": "sft", **unevaluated})
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(log.name for log in (out / "logs").iterdir()) == ["prints.log", "trainer.log"]
    assert summary_of(out)["steps"] == {"sft": 2}


PRINTING_REWARD = """
def score(sample):
    print(f"\\x1b[2J{sample.prompt} {sample.response}")
    return {"reward": len(sample.response) - 10, "length": len(sample.response)}
"""


@pytest.mark.slow
def test_sft_with_evaluation_starts_the_reserved_engine_and_shows_what_the_reward_prints(tmp_path: Path) -> None:
    out = tmp_path / "run"
    (tmp_path / "reward.py").write_text(PRINTING_REWARD)
    supervised = {"spec.recipe.mode": "sft", "spec.recipe.evaluation.everySteps": "0"}
    argv = command(out, **supervised, **{"spec.recipe.code.path": tmp_path})
    done = ran([*argv, "--show-prints"], timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = sorted(log.name for log in (out / "logs").iterdir())
    assert logs == ["manager.log", "prints.log", "reserved.log", "trainer.log"]
    summary = summary_of(out)
    assert summary["exactMatch"] == {}
    assert [point["stage"] for point in summary["evaluations"]] == ["", "sft"]
    assert {*summary["evaluations"][0]["values"]} == {"reward", "length", "clip_ratio"}
    printed = (out / "logs" / "prints.log").read_text().splitlines()
    assert len(printed) == 32
    assert all(line.startswith("\x1b[2J") for line in printed)
    shown = [line for line in done.stdout.splitlines() if line.startswith("print: \\x1b[2J")]
    assert len(shown) == 32
    assert "\x1b[2J" not in done.stdout
    assert "evaluated after SFT" in done.stdout
    assert "exact match" not in done.stdout


def test_who_interrupts_while_libraries_load_sees_no_traceback() -> None:
    # A job in the background of a shell inherits that interrupts are ignored.
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    argv = [sys.executable, "-P", "-X", "importtime", "-c", f"{heeds}; from polyrl_cli.start import main; main()", "ls"]
    started = StartedProcess(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert started.stderr is not None
    next(line for line in started.stderr if line.endswith(" typer\n"))
    started.send_signal(signal.SIGINT)
    _, printed = started.communicate(timeout=DEADLINE_S)
    # On a crowded machine the last of them may be loaded by then, and the command says itself that it was interrupted.
    assert started.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert "Traceback" not in printed


def test_who_interrupts_while_the_command_is_made_sees_no_traceback() -> None:
    heeds = "import signal, typer.main; signal.signal(signal.SIGINT, signal.default_int_handler)"
    made = "typer.main.get_command = lambda app: signal.raise_signal(signal.SIGINT)"
    argv = [sys.executable, "-P", "-c", f"{heeds}; {made}; from polyrl_cli.start import main; main()", "ls"]
    done = ran(argv, timeout_s=DEADLINE_S)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "")


def test_a_missing_folder_to_resume_is_a_sentence(tmp_path: Path) -> None:
    done = run(tmp_path / "nowhere", resume=True)
    assert done.returncode == 2
    assert "no run lies there" in done.stderr
    assert "Traceback" not in done.stderr
