"""What a run has trained is usable as it lies: whoever loads it, it answers as in the run's own evaluation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from polyrl_cli.app import app

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "sort-digits"
DEADLINE_S = 240
EVALUATED = 4

SMALL = {
    "spec.recipe.sft.steps": 12,
    "spec.recipe.algorithm.steps": 2,
    "spec.recipe.algorithm.promptsPerStep": 8,
    "spec.recipe.algorithm.miniBatchPrompts": 8,
    "spec.recipe.algorithm.minMicroBatchSamples": 16,
    "spec.recipe.evaluation.maxSamples": EVALUATED,
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
    return float(len(sample.response) % 3)
"""
"""A reward that keeps every answer; the last one to an evaluation prompt is the trained model's."""


def polyrl(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "polyrl_cli.app", *map(str, words)]
    # Whatever is not in the folder must not come from anywhere else either.
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=env)


def ask(*words: object) -> Result:
    """The command in this process, which has the libraries that a new one takes seconds to load."""
    return CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A finished run, and its answers to prompts by prompt."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(EXAMPLE, folder / "job")
    (folder / "job" / "reward.py").write_text(RECORDING.format(file=str(folder / "answers")))
    sets = [f"--set={path}={value}" for path, value in SMALL.items()]
    done = polyrl("run", folder / "job" / "job.yaml", "--no-check", *sets, "--out", folder / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run", dict(map(json.loads, (folder / "answers").read_text().splitlines()))


@pytest.fixture(scope="module")
def exported(finished: tuple[Path, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("exported") / "model"
    done = polyrl("export", finished[0], model)
    assert (done.returncode, done.stderr) == (0, "")
    return model


@pytest.mark.slow
def test_transformers_answers_as_the_evaluation_did(finished: tuple[Path, dict[str, str]], exported: Path) -> None:
    run, answers = finished
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
def test_generate_answers_as_the_evaluation_did(finished: tuple[Path, dict[str, str]], exported: Path) -> None:
    run, answers = finished
    prompt = json.loads((EXAMPLE / "eval.jsonl").read_text().splitlines()[0])["prompt"]
    assert polyrl("generate", run, prompt).stdout == answers[prompt] + "\n"
    assert ask("generate", exported, prompt).stdout == answers[prompt] + "\n"
    drawn = ask("generate", run, prompt, "--n", 3, "--temperature", 1, "--seed", 5, "--max-tokens", 4)
    assert len(drawn.stdout.splitlines()) == 3, drawn.stderr
    again = ask("generate", run, prompt, "--n", 3, "--temperature", 1, "--seed", 5, "--max-tokens", 4)
    assert again.stdout == drawn.stdout


@pytest.mark.slow
def test_a_prompt_outside_the_alphabet_is_refused_in_one_line(finished: tuple[Path, dict[str, str]]) -> None:
    refused = ask("generate", finished[0], "12 x>")
    assert refused.exit_code == 2
    assert refused.stderr.count("\n") == 1, refused.stderr
    assert "does not know" in refused.stderr


@pytest.mark.slow
def test_the_folder_is_whole_and_speaks_of_no_machine(finished: tuple[Path, dict[str, str]], exported: Path) -> None:
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
        assert f"| evaluation {moment} | reward " in card, "the last evaluation comes after the last checkpoint"


@pytest.mark.slow
def test_a_step_may_be_named_and_a_full_folder_is_refused(
    finished: tuple[Path, dict[str, str]], exported: Path, tmp_path: Path
) -> None:
    assert "rl-step-000001" in polyrl("export", finished[0], tmp_path / "one", "--step", 1).stdout
    for words, sentence in {
        ("export", finished[0], exported): "the folder is not empty",
        (
            "export",
            finished[0],
            tmp_path / "two",
            "--step",
            77,
        ): "the run has kept sft-step-000011, sft-step-000012, rl",
        ("export", tmp_path, tmp_path / "two"): "no run lies there",
    }.items():
        refused = polyrl(*words)
        assert (refused.returncode, sentence in refused.stderr) == (2, True), refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
