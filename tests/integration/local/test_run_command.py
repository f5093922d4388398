"""`polyrl run` with its real trainer, engines and manager, on a job small enough for a test."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from polyrl.sample_record import SAMPLES, parse_records
from polyrl_cli.app import USER_ERROR, app
from polyrl_cli.local.run_folder import RunFolder, locked
from polyrl_cli.report.timeline import read_metrics

ROOT = Path(__file__).parents[3]
JOB = ROOT / "examples" / "sort-digits" / "job.yaml"
DEADLINE_S = 240
POLL_S = 0.2
LONG_STEPS = 24
"""A quarter of a second each on idle cores: not over yet when it is interrupted after the second."""

SMALL = {
    "spec.recipe.sft.steps": 2,
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
    what = ["resume", str(out)] if resume else ["run", str(JOB), "--out", str(out)]
    return [sys.executable, "-m", "polyrl_cli.app", *what, *sets]


def run(out: Path, resume: bool = False, **changes: object) -> subprocess.CompletedProcess[str]:
    argv = command(out, resume, **changes)
    return subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def summary_of(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


def steps_of(out: Path, phase: str) -> list[int]:
    return [report.step for report in read_metrics(out / "metrics.jsonl") if report.phase == phase]


@pytest.mark.slow
def test_sft_and_rl_and_the_same_folder_is_refused_afterwards(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = run(out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary_of(out)["steps"] == {"sft": 2, "rl": 4}
    assert set(summary_of(out)["exactMatch"]) == {"base", "afterSft", "afterRl"}
    again = run(out)
    assert again.returncode == 2
    assert "the folder is not empty" in again.stderr
    what_the_model_wrote_can_be_read(out)
    assert "reward 0" in " ".join(done.stdout.split())
    assert "= 256 trained + 48 evaluated + 0 discarded" in " ".join(done.stdout.split())
    runs_are_listed_and_compared(out)


def runs_are_listed_and_compared(out: Path) -> None:
    killed = out.parent / "killed"
    (killed / "run").mkdir(parents=True)
    job = json.loads((out / "job.json").read_text())
    job["spec"]["recipe"]["seed"] = 12345
    (killed / "job.json").write_text(json.dumps(job))
    listed = [json.loads(line) for line in ask("ls", out.parent, "--json").stdout.splitlines()]
    assert [(one["run"], one["state"]) for one in listed] == [(str(killed), "killed"), (str(out), "succeeded")]
    assert listed[1]["steps"] == {"sft": 2, "rl": 4}
    with locked(RunFolder(killed)):
        assert "running" in ask("ls", out.parent).stdout
    fetched = out.parent / "fetched"
    fetched.mkdir()
    for name in ("job.json", "metrics.jsonl", "samples.jsonl", "trainer-result.json"):
        (fetched / name).write_bytes((out / name).read_bytes())
    listed = [json.loads(line) for line in ask("ls", out.parent, "--json").stdout.splitlines()]
    assert (listed[0]["run"], listed[0]["state"]) == (str(fetched), "succeeded")
    assert listed[0]["wallSeconds"] > 0
    assert ask("samples", fetched).stdout == ask("samples", out).stdout
    drawn = out.parent / "both.png"
    compared = ask("compare", out, killed, "--plot", drawn, "--json")
    assert json.loads(compared.stdout)["settings"] == {"spec.recipe.seed": ["0", "12345"]}
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert "settings that differ" in ask("compare", out, killed).stdout
    for words, sentence in (
        ((out,), "name two runs or more"),
        ((out, out.parent / "nowhere"), "no run lies there"),
        ((out, killed, "--plot", out.parent / "both.docx"), "cannot be drawn there"),
    ):
        refused = ask("compare", *words)
        assert (refused.exit_code, sentence in refused.stderr) == (USER_ERROR, True), refused.stderr


def ask(*words: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)


def what_the_model_wrote_can_be_read(out: Path) -> None:
    newest = [json.loads(line) for line in ask("samples", out, "--json").stdout.splitlines()]
    assert {(row["purpose"], row["step"]) for row in newest} == {("train", 4)}
    assert 8 <= len(newest) <= 10
    evaluated = [json.loads(line) for line in ask("samples", out, "--evaluation", "--json").stdout.splitlines()]
    assert len(evaluated) == 10
    prompts = {json.loads(line)["prompt"] for line in (JOB.parent / "eval.jsonl").read_text().splitlines()}
    assert {row["prompt"] for row in evaluated} <= prompts
    text = ask("samples", out, "--group", str(newest[0]["group"])).stdout
    assert newest[0]["prompt"] in text
    explained = ask("explain", out, newest[0]["sample"]).stdout
    assert f"prompt:\n    {newest[0]['prompt']}\n" in explained
    assert "trained: batch" in explained
    assert "measured: batch" in ask("explain", out, evaluated[0]["sample"]).stdout
    unknown = ask("explain", out, "99999.0")
    assert unknown.exit_code == USER_ERROR
    assert newest[0]["sample"].split(".")[0] in unknown.stderr
    written = [path.name for path in (out / "tensorboard").iterdir()]
    assert any(b"samples/eval" in (out / "tensorboard" / name).read_bytes() for name in written)


@pytest.mark.slow
def test_interrupted_and_resumed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = subprocess.Popen(
        command(out, **{"spec.recipe.algorithm.steps": LONG_STEPS}), stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + DEADLINE_S
    while len(steps_of(out, "rl")) < 2:
        assert time.monotonic() < deadline, "no RL step came"
        assert first.poll() is None
        time.sleep(POLL_S)
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 130
    assert summary_of(out)["outcome"] == "interrupted"
    reached = summary_of(out)["steps"]["rl"]
    refused = run(out, resume=True, **{"spec.recipe.model.config.hidden_size": 64})
    assert refused.returncode == 2
    assert refused.stderr.startswith("--set spec.recipe.model.config.hidden_size: was 128 when the run began, 64 now")
    done = run(out, resume=True, **{"spec.recipe.algorithm.steps": LONG_STEPS})
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
    argv = command(out, **{"spec.recipe.mode": "sft", "spec.recipe.code.path": tmp_path})
    done = subprocess.run([*argv, "--show-prints"], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
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


def test_a_missing_folder_to_resume_is_a_sentence(tmp_path: Path) -> None:
    done = run(tmp_path / "nowhere", resume=True)
    assert done.returncode == 2
    assert "no run lies there" in done.stderr
    assert "Traceback" not in done.stderr
