"""`polyrl plan`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyrl.errors import UserError
from polyrl_cli.local.plan import plan_lines

JOB = """
apiVersion: polyrl.dev/v1alpha1
kind: PolyRLJob
metadata: {name: planned}
spec:
  recipe:
    model: {path: MODEL}
    data: {rl: [{path: rows.jsonl}]}
    reward: {function: "reward:score"}
    algorithm: {steps: 10}
    maxTokensPerMicroBatch: 8192
  trainer: {reservedEngine: false}
  rollout: {replicas: 2, maxReplicas: 2}
"""


def written(folder: Path, model: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(JOB.replace("MODEL", model))
    return path


def planned(path: Path, gpu: str | None = "H100", *sets: str, gpus: int | None = None) -> tuple[list[str], bool]:
    return plan_lines(path, sets, gpu, rollout_gpu="L4", gpus=gpus, as_json=False)


@pytest.mark.parametrize("place", ["{}", "hf://{}", "hf://{}@main"], ids=["a name", "a URI", "a revision"])
def test_a_model_that_is_not_here_is_planned_by_its_name(tmp_path: Path, place: str) -> None:
    name = place.format("Qwen/Qwen2.5-1.5B-Instruct")
    lines, fits = planned(written(tmp_path, name))
    assert fits
    assert lines[0] == f"{name}: 1,543,714,304 parameters in 28 layers, by the sizes of usual models"
    assert "learner: 1 GPU of 79.6 GiB" in lines
    assert "rollout: 2 GPUs of 22.5 GiB" in lines
    assert "  optimizer             11.5 GiB" in lines


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (["spec.trainer.fsdp.cpuOffload=optimizer"], "the learner's optimizer: 11.5 GiB of its hosts' memory"),
        (
            ["spec.trainer.fsdp.cpuOffload=all"],
            "the learner's weights, gradients and optimizer: 23.0 GiB of its hosts' memory",
        ),
        (
            ["spec.trainer.fsdp.cpuOffload=all", "spec.recipe.algorithm.klCoefficient=0.1"],
            "the learner's weights, gradients, optimizer and reference: 28.8 GiB of its hosts' memory",
        ),
    ],
    ids=["moments", "all", "with a reference"],
)
def test_what_the_host_holds_is_named(tmp_path: Path, sets: list[str], line: str) -> None:
    lines, _ = planned(written(tmp_path, "Qwen/Qwen2.5-1.5B"), "H100", *sets)
    assert line in lines


def test_what_does_not_fit_says_so(tmp_path: Path) -> None:
    lines, fits = planned(written(tmp_path, "Qwen/Qwen2.5-7B"))
    assert not fits
    assert any(line.startswith("  does not fit: ") for line in lines)
    assert any(line.startswith("change: learner: set recipe.model.lora to {}") for line in lines)


def test_a_folder_s_own_config_counts(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 512, **sizes}))
    lines, fits = planned(written(tmp_path, "model"))
    assert fits
    assert "parameters in 2 layers, by its config.json" in lines[0]
    assert "  weights                0.6 MiB" in lines


def test_a_fresh_model_has_what_its_architecture_has_where_the_manifest_is_silent(tmp_path: Path) -> None:
    path = written(tmp_path, "MODEL")
    config = "config: {model_type: qwen2, vocab_size: 512, hidden_size: 64, num_hidden_layers: 2}, tokenizer: {path: .}"
    job = path.read_text().replace("path: MODEL", config).replace("rollout: {", "rollout: {engine: {type: embedded}, ")
    path.write_text(job)
    lines, fits = planned(path)
    assert fits
    assert lines[0].endswith("parameters in 2 layers, by recipe.model.config")


def test_one_object_of_json_holds_the_same(tmp_path: Path) -> None:
    path = written(tmp_path, "Qwen/Qwen2.5-1.5B")
    (line,), fits = plan_lines(path, (), "H100", rollout_gpu=None, gpus=3, as_json=True)
    found = json.loads(line)
    assert (found["fits"], fits, found["passTokens"], found["changes"]) == (True, True, 8192, [])
    learner, rollouts = found["gpus"]
    assert (learner["use"], rollouts["gpus"], learner["tokensInFlight"]) == ("learner", 2, None)
    assert sum(learner["parts"].values()) == learner["total"] == learner["memory"] - learner["left"]


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "words"),
    [
        ("someone/own-model", "H100", None, "spec.recipe.model: the sizes of someone/own-model are not known; give"),
        ("Qwen/Qwen2.5-1.5B", "V100", None, "GPU V100: is none of L4-24GB"),
        ("Qwen/Qwen2.5-1.5B", "H100", 2, "spec.rollout.replicas: 2 rollouts of 1 GPU each"),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path: Path, model: str, gpu: str, gpus: int | None, words: str) -> None:
    with pytest.raises(UserError, match=words):
        planned(written(tmp_path, model), gpu, gpus=gpus)


def test_without_a_gpu_here_one_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match="name one: --gpu H100-80GB"):
        planned(written(tmp_path, "Qwen/Qwen2.5-1.5B"), None)


def test_all_that_is_unknown_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        plan_lines(written(tmp_path, "nobody/nothing"), [], "X9", rollout_gpu="Y9", gpus=None, as_json=False)
    words = ("nobody/nothing", "GPU X9", "GPU Y9")
    assert all(word in line for word, line in zip(words, str(refused.value).splitlines(), strict=True))


@pytest.mark.parametrize("text", ["0", "80", "0Gi", "1023Mi", "80000Gi", "-5", "nan", "", "1e9Gi"])
def test_what_no_gpu_has_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=f"GPU {text}: .* such as 80Gi"):
        planned(written(tmp_path, "Qwen/Qwen2.5-1.5B"), text)
