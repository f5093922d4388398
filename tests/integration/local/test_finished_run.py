"""A run of SFT and RL, read by every command once it is over: what it did, what its model wrote, who answers alike."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from polyrl_cli.app import USER_ERROR, app
from polyrl_cli.local.run_folder import RunFolder, locked
from tests.integration.local.job_runs import polyrl

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "sort-digits"
DEADLINE_S = 500
EVALUATED = 4

SMALL = {
    "spec.recipe.sft.steps": 12,
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

RECORDING = """
import json

def score(sample):
    with open({file!r}, "a") as answers:
        answers.write(json.dumps([sample.prompt, sample.response]) + "\\n")
    return exact(sample)
"""
"""Keeps every answer for the example's own reward; the last one to an evaluation prompt is the trained model's."""
Finished = tuple[Path, dict[str, str], str]
"""A run's folder, the model's answers by prompt, and what the command printed."""


def ask(*words: object) -> Result:
    """The command in this process, which has the libraries that a new one takes seconds to load."""
    return CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)


def start(folder: Path) -> subprocess.CompletedProcess[str]:
    """The job in `folder`, run to its end beside it."""
    sets = [f"--set={path}={value}" for path, value in SMALL.items()]
    return polyrl("run", folder / "job" / "job.yaml", *sets, "--out", folder / "runs" / "run")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(EXAMPLE, folder / "job")
    reward = folder / "job" / "reward.py"
    reward.write_text(
        reward.read_text().replace("def score(", "def exact(") + RECORDING.format(file=str(folder / "answers"))
    )
    done = start(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = dict(map(json.loads, (folder / "answers").read_text().splitlines()))
    return folder / "runs" / "run", answers, done.stdout


@pytest.fixture(scope="module")
def exported(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("exported") / "model"
    done = polyrl("export", finished[0], model)
    assert (done.returncode, done.stderr) == (0, "")
    return model


@pytest.mark.slow
def test_sft_and_rl_and_the_same_folder_is_refused_afterwards(finished: Finished) -> None:
    out, _, printed = finished
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == {"sft": 12, "rl": 4}
    assert set(summary["exactMatch"]) == {"base", "afterSft", "afterRl"}
    again = start(out.parents[1])
    assert again.returncode == 2
    assert "the folder is not empty" in again.stderr
    what_the_model_wrote_can_be_read(out)
    assert "reward 0" in " ".join(printed.split())
    assert "= 256 trained + 48 evaluated + 0 discarded" in " ".join(printed.split())
    runs_are_listed_and_compared(out)


def runs_are_listed_and_compared(out: Path) -> None:
    killed = out.parent / "killed"
    (killed / "run").mkdir(parents=True)
    job = json.loads((out / "job.json").read_text())
    job["spec"]["recipe"]["seed"] = 12345
    (killed / "job.json").write_text(json.dumps(job))
    listed = [json.loads(line) for line in ask("ls", out.parent, "--json").stdout.splitlines()]
    assert [(one["run"], one["state"]) for one in listed] == [(str(killed), "killed"), (str(out), "succeeded")]
    assert listed[1]["steps"] == {"sft": 12, "rl": 4}
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


def what_the_model_wrote_can_be_read(out: Path) -> None:
    newest = [json.loads(line) for line in ask("samples", out, "--json").stdout.splitlines()]
    assert {(row["purpose"], row["step"]) for row in newest} == {("train", 4)}
    assert 8 <= len(newest) <= 10
    evaluated = [json.loads(line) for line in ask("samples", out, "--evaluation", "--json").stdout.splitlines()]
    assert len(evaluated) == 10
    prompts = {json.loads(line)["prompt"] for line in (EXAMPLE / "eval.jsonl").read_text().splitlines()}
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
def test_transformers_answers_as_the_evaluation_did(finished: Finished, exported: Path) -> None:
    run, answers, _ = finished
    program = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:3]:
    tokenizer, model = (kind.from_pretrained(folder) for kind in (AutoTokenizer, AutoModelForCausalLM))
    for prompt in sys.argv[3:]:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        print(json.dumps(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True)))
"""
    rows = [json.loads(line) for line in (EXAMPLE / "eval.jsonl").read_text().splitlines()[:EVALUATED]]
    prompts = [row["prompt"] for row in rows]
    folders = [str(exported), str(max(run.glob("checkpoints/rl-step-*")) / "model")]
    argv = [sys.executable, "-P", "-c", program, *folders, *prompts]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(exported.parent / "no-cache")}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=True, env=env)
    assert [json.loads(line) for line in done.stdout.splitlines()] == 2 * [answers[prompt] for prompt in prompts]


@pytest.mark.slow
def test_generate_answers_as_the_evaluation_did(finished: Finished, exported: Path) -> None:
    run, answers, _ = finished
    prompt = json.loads((EXAMPLE / "eval.jsonl").read_text().splitlines()[0])["prompt"]
    assert polyrl("generate", run, prompt).stdout == answers[prompt] + "\n"
    assert ask("generate", exported, prompt).stdout == answers[prompt] + "\n"
    drawn = ask("generate", run, prompt, "--n", 3, "--temperature", 1, "--seed", 5, "--max-tokens", 4)
    assert len(drawn.stdout.splitlines()) == 3, drawn.stderr
    again = ask("generate", run, prompt, "--n", 3, "--temperature", 1, "--seed", 5, "--max-tokens", 4)
    assert again.stdout == drawn.stdout


@pytest.mark.slow
def test_a_prompt_outside_the_alphabet_is_refused_in_one_line(finished: Finished) -> None:
    refused = ask("generate", finished[0], "12 x>")
    assert refused.exit_code == 2
    assert refused.stderr.count("\n") == 1, refused.stderr
    assert "does not know" in refused.stderr


@pytest.mark.slow
def test_the_folder_is_whole_and_speaks_of_no_machine(finished: Finished, exported: Path) -> None:
    names = {path.name for path in exported.iterdir()}
    assert names == {
        "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "polyrl.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    text = "".join((exported / name).read_text() for name in names if not name.endswith("safetensors"))
    for private in (str(ROOT), str(finished[0]), str(Path.home()), str(exported)):
        assert private not in text
    card = (exported / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for moment in ("before", "after SFT", "after RL"):
        rows = [line for line in card.splitlines() if line.startswith(f"| evaluation {moment} | ")]
        assert ["reward " in row for row in rows] == [True], "the last evaluation comes after the last checkpoint"


@pytest.mark.slow
def test_a_step_may_be_named_and_a_full_folder_is_refused(finished: Finished, exported: Path, tmp_path: Path) -> None:
    assert "rl-step-000003" in polyrl("export", finished[0], tmp_path / "one", "--step", 3).stdout
    for words, sentence in {
        ("export", finished[0], exported): "the folder is not empty",
        (
            "export",
            finished[0],
            tmp_path / "two",
            "--step",
            77,
        ): "the run has kept sft-step-000012, rl-step-000002",
        ("export", tmp_path, tmp_path / "two"): "no run lies there",
    }.items():
        refused = polyrl(*words)
        assert (refused.returncode, sentence in refused.stderr) == (2, True), refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
