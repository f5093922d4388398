"""Manifests that must not pass: each is refused at the right line, with the field's path, in a sentence that helps."""

# ruff: noqa: E501 - a row of a table is one line
from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polyrl.errors import InvalidManifest
from polyrl_cli.manifests import load
from polyrl_cli.manifests.load import (
    check_files,
    load_for_this_machine,
    load_manifest,
    notes,
    read_manifest,
    validation_report,
)
from tests.integration.local.job_runs import polyrl

GOOD = """\
apiVersion: polyrl.dev/v1alpha1
kind: PolyRLJob
metadata:
  name: sort
spec:
  recipe:
    mode: sft+rl
    model:
      config: {model_type: qwen2, pad_token_id: null}
      tokenizer: {type: characters, alphabet: "0123456789 "}
    data:
      sft: [{path: sft.jsonl}]
      rl: [{path: rl.jsonl}]
    sft:
      steps: 4
      optimizer: {learningRate: 1e-3}
    algorithm:
      steps: 4
      promptsPerStep: 32
    sampling:
      maxNewTokens: 8
    reward: {function: "reward:score"}
  rollout:
    engine: {type: embedded}
    minReplicas: 0
    maxReplicas: 2
"""
REWARD = "async def score(sample):\n    return 1.0\n"


ROWS = 32
"""Prompts of a step, of which fewer are a note."""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A valid manifest and the files it names."""
    (tmp_path / "job.yaml").write_text(GOOD)
    (tmp_path / "sft.jsonl").write_text('{"prompt": "1", "response": "1"}\n')
    (tmp_path / "rl.jsonl").write_text('{"prompt": "1"}\n' * ROWS)
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path / "job.yaml"


def refusal(job: Path, *sets: str, absolute: bool = True) -> list[str]:
    with pytest.raises(InvalidManifest) as refused:
        check_files(load_manifest(job, sets), job, sets, absolute=absolute)
    assert str(refused.value).splitlines() == refused.value.faults
    return refused.value.faults


def expected(job: Path, line: int, path: str) -> str:
    return f"{job}:{line} {path}: "


# What is replaced in GOOD, by what; then the line, the field and words of the one sentence that must come.
FIELDS = [
    ("maxReplicas: 2", "maxReplica: 2", 26, "spec.rollout.maxReplica", "unknown field; did you mean maxReplicas?"),
    ("maxReplicas: 2", "max_replicas: 2", 26, "spec.rollout.max_replicas", "did you mean maxReplicas?"),
    ("mode: sft+rl", "mode: sft+rl\n    maxReplicas: 2", 8, "spec.recipe.maxReplicas", "did you mean spec.rollout.maxReplicas?"),
    ("mode: sft+rl", "mode: sft+rl\n    zzz: 2", 8, "spec.recipe.zzz", "unknown field; known here: activationCheckpointing, algorithm, checkpoint"),
    ("{type: embedded}", "{type: embedded, x: {}}", 24, "spec.rollout.engine.x", "unknown field; known here: args"),
    ("minReplicas: 0", "minReplicas: 3", 26, "spec.rollout.maxReplicas", "2 is less than minReplicas (3)"),
    ("maxReplicas: 2", 'maxReplicas: "2"', 26, "spec.rollout.maxReplicas", "'2' is text; write the number without quotes"),
    ("maxReplicas: 2", "maxReplicas: two", 26, "spec.rollout.maxReplicas", "'two' is not a whole number"),
    ("maxReplicas: 2", "maxReplicas: 2.5", 26, "spec.rollout.maxReplicas", "2.5 is not a whole number"),
    ("maxReplicas: 2", "maxReplicas: true", 26, "spec.rollout.maxReplicas", "true is not a whole number"),
    ("maxReplicas: 2", "maxReplicas: -1", 26, "spec.rollout.maxReplicas", "-1 is less than the least allowed, 0"),
    ("maxReplicas: 2", "maxReplicas: 99999", 26, "spec.rollout.maxReplicas", "99999 is more than the most allowed, 1024"),
    ("maxReplicas: 2", f"maxReplicas: {10**30}", 26, "spec.rollout.maxReplicas", "more than the most allowed, 1024"),
    ("maxReplicas: 2", "maxReplicas: " + "9" * 5000, 26, "spec.rollout.maxReplicas", "is not a whole number"),
    ("maxReplicas: 2", "maxReplicas: [2]", 26, "spec.rollout.maxReplicas", "a list is not a whole number"),
    ("mode: sft+rl", "mode: sft-rl", 7, "spec.recipe.mode", "'sft-rl' is not sft or rl or sft+rl or offline-rl or dpo or reward-model; did you mean sft+rl?"),
    ("mode: sft+rl", "mode: 7", 7, "spec.recipe.mode", "7 is not sft or rl"),
    ("mode: sft+rl", "mode: sft+rl\n    seed: -5", 8, "spec.recipe.seed", "-5 is less than the least allowed, 0"),
    ("learningRate: 1e-3", "learningRate: 0", 16, "spec.recipe.sft.optimizer.learningRate", "0 is not more than 0"),
    ("learningRate: 1e-3", "learningRate: fast", 16, "spec.recipe.sft.optimizer.learningRate", "'fast' is not a number"),
    ("learningRate: 1e-3", "learningRate: .nan", 16, "spec.recipe.sft.optimizer.learningRate", "nan is not a finite number"),
    ("learningRate: 1e-3", "betas: [0.9]", 16, "spec.recipe.sft.optimizer.betas[1]", "is required"),
    ("learningRate: 1e-3", "betas: [0.9, 1.5]", 16, "spec.recipe.sft.optimizer.betas[1]", "1.5 is not less than 1"),
    ("learningRate: 1e-3", "betas: 0.9", 16, "spec.recipe.sft.optimizer.betas", "needs a list"),
    ("steps: 4\n      optimizer", "steps: 0\n      optimizer", 15, "spec.recipe.sft.steps", "mode sft+rl needs at least 1 step"),
    ("steps: 4\n      prompts", "steps: 0\n      prompts", 18, "spec.recipe.algorithm.steps", "needs at least 1 step"),
    ("sft: [{path: sft.jsonl}]", "sft: []", 12, "spec.recipe.data.sft", "mode sft+rl needs at least one file"),
    ("rl: [{path: rl.jsonl}]", "rl:", 13, "spec.recipe.data.rl", "mode sft+rl needs at least one file"),
    ("rl: [{path: rl.jsonl}]", "rl: {path: rl.jsonl}", 13, "spec.recipe.data.rl", "needs a list"),
    ("rl: [{path: rl.jsonl}]", "rl: [{weight: 2}]", 13, "spec.recipe.data.rl[0].path", "is required (jSONL"),
    ("rl: [{path: rl.jsonl}]", "rl: [rl.jsonl]", 13, "spec.recipe.data.rl[0]", "needs fields (key: value), not 'rl.jsonl'"),
    ("rl: [{path: rl.jsonl}]", "rl: [{path: 7}]", 13, "spec.recipe.data.rl[0].path", "7 is not text; put it in quotes"),
    # A file of that name would be written 007; "7.0" was what the sentence said to write.
    ("rl: [{path: rl.jsonl}]", "rl: [{path: 007}]", 13, "spec.recipe.data.rl[0].path", "7.0 is not text; put it in quotes, as it stands there"),
    ("rl: [{path: rl.jsonl}]", "rl: [{path: ''}]", 13, "spec.recipe.data.rl[0].path", "is empty"),
    ("    reward: {function: \"reward:score\"}\n", "", 6, "spec.recipe.reward", "mode sft+rl needs a reward function"),
    ('"reward:score"', '"reward.score"', 22, "spec.recipe.reward.function", "'reward.score' is not of the form module:function"),
    ('"reward:score"', '"reward.py:score()"', 22, "spec.recipe.reward.function", "is not of the form module:function"),
    ("config: {model_type: qwen2, pad_token_id: null}", "dtype: float32", 8, "spec.recipe.model", "needs path"),
    ("config: {model_type: qwen2, pad_token_id: null}", "config: {hidden_size: 8}", 9, "spec.recipe.model.config", "needs model_type"),
    ("config: {", "path: m\n      config: {", 10, "spec.recipe.model.config", "from path or from config, not from both"),
    ('alphabet: "0123456789 "', 'alphabet: ""', 10, "spec.recipe.model.tokenizer.alphabet", "needs its alphabet"),
    ('"0123456789 "', '"01233"', 10, "spec.recipe.model.tokenizer.alphabet", "each character may stand in it only once"),
    ('type: characters, alphabet: "0123456789 "', "type: huggingface", 10, "spec.recipe.model.tokenizer", "has no tokenizer of its own"),
    ("promptsPerStep: 32", "promptsPerStep: 32\n      miniBatchPrompts: 5", 20, "spec.recipe.algorithm.miniBatchPrompts", "5 does not divide promptsPerStep (32)"),
    ("promptsPerStep: 32", "oldLogProbs: reuse\n      updateEpochs: 2", 19, "spec.recipe.algorithm.oldLogProbs", "its ratio is always 1; leave miniBatchPrompts and updateEpochs out"),
    ("promptsPerStep: 32", "groupFilter: custom", 17, "spec.recipe.algorithm.filterFunction", "needs a filterFunction"),
    ("promptsPerStep: 32", "name: gpro", 19, "spec.recipe.algorithm.name", "'gpro' is not grpo"),
    ("maxNewTokens: 8", "maxNewTokens: 4096", 21, "spec.recipe.sampling.maxNewTokens", "no room for a prompt in rollout.engine.maxContext (4096)"),
    ("maxNewTokens: 8", "samplesPerPrompt: 1", 21, "spec.recipe.sampling.samplesPerPrompt", "1 is too few"),
    ("promptsPerStep: 32\n    sampling:", "name: rloo\n    sampling:\n      samplesPerPrompt: 1", 21, "spec.recipe.sampling.samplesPerPrompt", "rloo compares the samples of a group: 1 is too few"),
    ("maxNewTokens: 8", "temperature: 0", 21, "spec.recipe.sampling.temperature", "learns nothing"),
    ("{type: embedded}", "{type: sglang}", 24, "spec.rollout.engine.type", "SGLang loads a folder"),
    ("{type: embedded}", "{type: embedded, kvTokens: 64}", 24, "spec.rollout.engine.kvTokens", "64 cannot hold one sequence"),
    ("{type: embedded}", "embedded", 24, "spec.rollout.engine", "needs fields (key: value), not 'embedded'"),
    ("maxReplicas: 2", "capacity: {baseOnDemand: 3}", 26, "spec.rollout.capacity.baseOnDemand", "3 is more than maxReplicas (1)"),
    ("maxReplicas: 2", "capacity: {fallback: {enabled: true}}", 26, "spec.rollout.capacity.fallback.enabled", "needs policy SpotPreferred"),
    ("maxReplicas: 2", "template: {spec: {}}", 26, "spec.rollout.template.spec.containers", "is required"),
    ("maxReplicas: 2", "template: {spec: {containers: []}}", 26, "spec.rollout.template.spec.containers", "has 0 entries; at least 1"),
    ("  rollout:", "  suspend: maybe\n  rollout:", 23, "spec.suspend", "'maybe' is not true or false"),
    ("  rollout:", "  trainer: {backend: JobSet}\n  rollout:", 23, "spec.trainer.backend", "unknown field"),
    ("  rollout:", "  pricing: {currency: dollars}\n  rollout:", 23, "spec.pricing.currency", "has 7 characters; at most 3"),
    ("  rollout:", "  scaling: {objective: Cost}\n  rollout:", 23, "spec.scaling.objective", "Cost weighs money"),
    ("  rollout:", "  faultInjection: [{atStep: 9, action: Kill}]\n  rollout:", 23, "spec.faultInjection", "at most algorithm.steps (4)"),
    ("  rollout:", "  faultInjection: [{atStep: 1}]\n  rollout:", 23, "spec.faultInjection[0].action", "is required"),
    ("name: sort", "name: Sort_Digits", 4, "metadata.name", "may only hold lower case letters"),
    ("name: sort", "name: " + "a" * 50, 4, "metadata.name", "has 50 characters; at most 46"),
    ("name: sort", "namespace: x", 3, "metadata.name", "is required"),
    ("polyrl.dev/v1alpha1", "polyrl.dev/v1", 1, "apiVersion", "'polyrl.dev/v1' is not polyrl.dev/v1alpha1"),
    ("kind: PolyRLJob", "kind: Job", 2, "kind", "'Job' is not PolyRLJob"),
    ("minReplicas: 0", "minReplicas: 0\n    minReplicas: 1", 26, "spec.rollout.minReplicas", "stands twice; the first is on line 25"),
    ("minReplicas: 0", "? [a]\n    : 0", 25, "spec.rollout", "a key must be plain text"),
    ("maxReplicas: 2", "maxReplicas: !!python/name:os.system x", 26, "spec.rollout.maxReplicas", "cannot be read with tag"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "line", "path", "words"), FIELDS, ids=[f"{row[3]}: {row[4]}" for row in FIELDS])
def test_a_wrong_field_is_named_with_its_line(job: Path, old: str, new: str, line: int, path: str, words: str) -> None:
    assert GOOD.count(old) == 1, "the table's own slip"
    job.write_text(GOOD.replace(old, new))
    faults = refusal(job)
    assert len(faults) == 1, faults
    assert faults[0].startswith(expected(job, line, path))
    assert words in faults[0]
    assert "nput should" not in faults[0]


# Texts that are no manifest at all, and how the one line goes on after the file's name.
TEXTS = [
    (b"", ": is empty; a manifest begins with apiVersion"),
    (b"# only a comment\n", ": is empty"),
    (b"- a\n- b\n", ":1 holds a list, not the fields of a manifest"),
    (b"just words\n", ":1 holds 'just words', not the fields"),
    (b"a: 1\n\tb: 2\n", ":2 is not valid YAML: this character cannot start a value; indent with spaces, not tabs"),
    (b"a: b: c\n", ":1 is not valid YAML: a colon cannot stand here"),
    (b"a: [1, 2\nb: 3\n", ":2 is not valid YAML: a bracket or brace is not closed"),
    (b"a:\n  b: 1\n c: 2\n", ":3 is not valid YAML: the indentation does not fit"),
    (b"a: [", ":1 is not valid YAML: the file ends inside a bracket or brace"),
    (b"a: *nothing\n", ":1 is not valid YAML: an alias (*) to an anchor (&) that is not there"),
    (b"a: 'x\n", ":2 is not valid YAML: a quote is not closed"),
    (b"a: 1\n---\na: 2\n", ":2 is not valid YAML: a second document starts here"),
    (b"\xff\xfe\x00\x01binary", ": is not text in UTF-8 (byte 0"),
    (b"a: \x01\n", ": holds the character #x0001"),
    (b"a: &x [*x]\n", ": is nested deeper than 64, or an alias holds itself"),
    (b"[" * 2000, ": is nested too deeply"),
    (b"a: 1\n" * 300_000, ": has 1,500,000 bytes; a manifest has at most 1,048,576"),
    (b"a: &a [1,1,1,1,1,1,1,1,1,1]\n" + b"".join(
        b"%c: &%c [%s]\n" % (k + 1, k + 1, b",".join([b"*%c" % k] * 10)) for k in range(97, 105)
    ), ": has more than 20,000 values, those of expanded aliases among them"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "words"), TEXTS, ids=[row[1][:40] for row in TEXTS])
def test_what_is_no_manifest_is_reported_in_one_line(job: Path, content: bytes, words: str) -> None:
    job.write_bytes(content)
    (fault,) = refusal(job)
    assert fault.startswith(f"{job}{words}")


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.yaml") == [f"{tmp_path / 'none.yaml'}: no such file"]
    assert refusal(tmp_path) == [f"{tmp_path}: is a folder; name the file"]


# A change to the files beside the manifest (name, new content or None to delete), then the line, field and words.
FILES = [
    ("sft.jsonl", None, 12, "spec.recipe.data.sft[0].path", "no such file: {folder}/sft.jsonl"),
    ("rl.jsonl", "", 13, "spec.recipe.data.rl[0].path", "rl.jsonl is empty"),
    ("reward.py", None, 22, "spec.recipe.reward.function", "no module reward in {folder}"),
    (
        "reward.py",
        "def scores(sample): ...\n",
        22,
        "spec.recipe.reward.function",
        "defines no score; did you mean scores?",
    ),
    ("reward.py", "x = 1\n", 22, "spec.recipe.reward.function", "defines no score"),
    ("reward.py", "def score(:\n", 22, "spec.recipe.reward.function", "reward.py:1 is not valid Python"),
    ("reward.py", "raise SystemExit(3)\n", 22, "spec.recipe.reward.function", "defines no score"),
    ("reward.py", "\0", 22, "spec.recipe.reward.function", "is not "),
]


@pytest.mark.parametrize(("name", "content", "line", "path", "words"), FILES, ids=[row[4] for row in FILES])
def test_a_wrong_file_is_named_at_its_field(
    job: Path, name: str, content: str, line: int, path: str, words: str
) -> None:
    file = job.parent / name
    file.unlink() if content is None else file.write_text(content)
    (fault,) = refusal(job)
    assert fault.startswith(expected(job, line, path))
    assert words.format(folder=job.parent) in fault


# Overrides that lead to files which are not right.
ELSEWHERE = [
    (["spec.recipe.data.rl[0].path=rl.csv"], "--set spec.recipe.data.rl[0].path: ", "is neither .jsonl nor .jsonl.gz nor .parquet"),
    (["spec.recipe.data.rl[0].path=d.jsonl"], "--set spec.recipe.data.rl[0].path: ", "is a folder, not a file"),
    (["spec.recipe.code.path=nowhere"], "--set spec.recipe.code.path: ", "no such folder"),
    (["spec.recipe.code.path=reward.py"], "--set spec.recipe.code.path: ", "is a file, not a folder"),
    (["spec.recipe.model={path: d.jsonl}"], "--set spec.recipe.model.path: ", "has no config.json"),
    (["spec.recipe.model={path: model}"], "--set spec.recipe.model.path: ", "holds no tokenizer"),
    (["spec.recipe.model.tokenizer={path: gone}"], "--set spec.recipe.model.tokenizer.path: ", "no such folder"),
    (["spec.recipe.algorithm.groupFilter=custom", "spec.recipe.algorithm.filterFunction=reward:keep"],
     "--set spec.recipe.algorithm.filterFunction: ", "defines no keep"),
    (["spec.recipe.algorithm.lossFunction=reward:loss"], "--set spec.recipe.algorithm.lossFunction: ", "defines no loss"),
    (["spec.recipe.algorithm.advantageFunction=reward:best"], "--set spec.recipe.algorithm.advantageFunction: ", "defines no best"),
    (["spec.recipe.environment={classPath: 'tools:Calculator'}"], "--set spec.recipe.environment.classPath: ", "no module tools"),
]  # fmt: skip


@pytest.mark.parametrize(("sets", "place", "words"), ELSEWHERE, ids=[row[2] for row in ELSEWHERE])
def test_a_wrong_file_named_by_a_flag_is_reported_at_the_flag(
    job: Path, sets: list[str], place: str, words: str
) -> None:
    (job.parent / "d.jsonl").mkdir()
    (job.parent / "model").mkdir()
    (job.parent / "model" / "config.json").write_text("{}")
    faults = refusal(job, *sets)
    assert any(fault.startswith(place) and words in fault for fault in faults), faults


OVERRIDES = [
    ("spec.rollout.maxReplicas", "write a path and a value, as spec.rollout.maxReplicas=4"),
    ("=4", "write a path and a value"),
    (
        "spec.recipe.data.rl.0.path=a.jsonl",
        "write a path and a value, as spec.rollout.maxReplicas=4 or spec.recipe.data.rl[0]",
    ),
    ("spec..rollout=4", "write a path and a value"),
    ("spec.rollout.maxReplica=4", "unknown field; did you mean maxReplicas?"),
    ("rollout.maxReplicas=4", "unknown field"),
    ("spec.maxReplicas=4", "did you mean spec.rollout.maxReplicas?"),
    ("data=[]", "unknown field; did you mean spec.recipe.data?"),
    (
        "spec.recipe.algorithm.learningRate=1",
        "unknown field; did you mean spec.recipe.algorithm.optimizer.learningRate?",
    ),
    ("spec.recipe.sft.learning_rate=1", "unknown field; did you mean spec.recipe.sft.optimizer.learningRate?"),
    (
        "spec.recipe.learningRate=1",
        "did you mean spec.recipe.algorithm.optimizer.learningRate or spec.recipe.dpo.optimizer.learningRate or spec.recipe.rewardModel.optimizer.learningRate or spec.recipe.sft.optimizer.learningRate?",
    ),
    (
        "spec.recipe.steps=1",
        "did you mean spec.recipe.algorithm.steps or spec.recipe.dpo.steps or spec.recipe.rewardModel.steps or spec.recipe.sft.steps?",
    ),
    ("replicas=1", "did you mean spec.rollout.replicas or spec.trainer.replicas?"),
    ("spec.rollout.maxReplicas=[", "'[' is not valid YAML"),
    ("spec.trainer.nothing.limits.memory=1Ti", "unknown field; there is no spec.trainer.nothing, known here: "),
    ("spec.recipe.env.A=1", "unknown field; spec.recipe.env is a list, whose elements are [0], [1] ..."),
    ("spec.rollout.maxReplicas.x=1", "unknown field; nothing stands below this"),
    ("spec.recipe.data.rl[5].path=x", "has 1 entries"),
    ("spec.rollout.maxReplicas=-1", "-1 is less than the least allowed, 0"),
]


@pytest.mark.parametrize(("override", "words"), OVERRIDES, ids=[row[0] for row in OVERRIDES])
def test_a_wrong_override_is_reported_at_the_flag(job: Path, override: str, words: str) -> None:
    (fault,) = refusal(job, override)
    assert fault.startswith("--set ")
    assert words in fault


def test_overrides_are_applied_in_order(job: Path) -> None:
    sets = ["spec.rollout.maxReplicas=7", "spec.recipe.data.rl[1]={path: rl.jsonl}", "spec.recipe.data.rl[1].weight=3"]
    spec = load_manifest(job, [*sets, "spec.recipe.model.config.hidden_size=64", "spec.rollout.maxReplicas=5"]).spec
    assert spec.rollout.max_replicas == 5
    assert [row.weight for row in spec.recipe.data.rl] == [1.0, 3.0]
    assert spec.recipe.model.config == {"model_type": "qwen2", "pad_token_id": None, "hidden_size": 64}


TEXT_VALUES = [
    # a field that holds text, what a shell hands over, what it becomes
    ("spec.recipe.model.tokenizer.alphabet", "0123456789", "0123456789"),
    ("spec.recipe.model.tokenizer.alphabet", "[]{}:,", "[]{}:,"),
    ("spec.recipe.model.tokenizer.alphabet", '"01"', "01"),
    ("spec.recipe.model.tokenizer.alphabet", "null", None),
    ("metadata.name", "1e3", "1e3"),
    ("metadata.name", "true", "true"),
]


@pytest.mark.parametrize(("field", "given", "value"), TEXT_VALUES, ids=[row[1] for row in TEXT_VALUES])
def test_an_override_of_a_text_is_a_text(job: Path, field: str, given: str, value: str | None) -> None:
    held: Any = read_manifest(job, [f"{field}={given}"]).data
    for key in field.split("."):
        held = held[key]
    assert held == value


def test_all_faults_come_at_once_in_file_order(job: Path) -> None:
    text = GOOD.replace("mode: sft+rl", "mode: sft+rl\n    sede: 1").replace(
        "promptsPerStep: 32", "promptsPerStep: many"
    )
    job.write_text(text.replace("minReplicas: 0", "minReplicas: 3").replace("name: sort", "name: S"))
    places = [fault.removeprefix(f"{job}:").partition(": ")[0] for fault in refusal(job)]
    assert places == [
        "4 metadata.name",
        "8 spec.recipe.sede",
        "20 spec.recipe.algorithm.promptsPerStep",
        "27 spec.rollout.maxReplicas",
    ]


def test_a_rule_is_silent_about_fields_that_are_wrong_themselves(job: Path) -> None:
    job.write_text(GOOD.replace("reward: {", "rewrad: {"))
    (fault,) = refusal(job)
    assert "did you mean reward?" in fault


def test_a_manifest_of_another_kind_is_not_picked_apart(job: Path) -> None:
    job.write_text("apiVersion: batch/v1\nkind: Job\nmetadata: {name: a}\nspec: {template: {}, completions: 3}\n")
    assert [fault.partition(" ")[2].partition(":")[0] for fault in refusal(job)] == ["apiVersion", "kind"]


def test_anchors_and_merge_keys_are_read(job: Path) -> None:
    merged = GOOD.replace("sft:\n      steps: 4", "sft:\n      <<: &few {steps: 4, batchSize: 8}\n      steps: 6")
    job.write_text(
        merged.replace("algorithm:\n      steps: 4", "algorithm:\n      steps: 4\n      minMicroBatchSamples: 2")
    )
    sft = load_manifest(job).spec.recipe.sft
    assert (sft.steps, sft.batch_size, sft.optimizer.learning_rate) == (6, 8, 1e-3)


def test_cluster_only_fields_give_one_note(job: Path) -> None:
    assert notes(load_manifest(job)) == []
    (note,) = notes(load_manifest(job, ["spec.suspend=true", "spec.rollout.capacity.preset=GKE"]))
    assert note == "on this machine spec.rollout.capacity, spec.suspend have no effect (cluster only)"


def test_pods_that_learn_together_are_processes_here(job: Path) -> None:
    several = ["spec.trainer.replicas=2", "spec.trainer.processesPerPod=3"]
    note, _ = notes(load_manifest(job, [*several, "spec.trainer.storage.accessMode=ReadWriteMany"]))
    assert note.startswith("on this machine the 2 pods of spec.trainer.replicas are processes that learn beside each")


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ([], ["on an embedded engine"]),
        (["spec.trainer.reservedEngine=false"], ["without spec.trainer.reservedEngine"]),
        (["spec.rollout.engine.type=sglang", "spec.recipe.model={path: model}"], []),
        (["spec.trainer.reservedSleep=auto"], []),
    ],
    ids=["embedded", "no such engine", "sglang", "as measured"],
)
def test_an_engine_that_never_sleeps_is_noted_where_it_is_to_sleep_always(
    job: Path, sets: list[str], words: list[str]
) -> None:
    found = notes(load_manifest(job, ["spec.trainer.reservedSleep=always", *sets]))
    assert len(found) == len(words)
    assert all(one in note for one, note in zip(words, found, strict=True))


def test_gpus_of_the_trainers_pod_are_processes_there_and_one_process_here(job: Path) -> None:
    pod = "{spec: {containers: [{name: trainer, resources: {limits: {nvidia.com/gpu: 4}}}]}}"
    sets = [f"spec.trainer.template={pod}", "spec.trainer.contextParallel=2"]
    assert load_manifest(job, sets).spec.trainer.processes_per_pod == 4
    with pytest.raises(InvalidManifest, match=r"2 does not divide .* processesPerPod \(1\)"):
        load_for_this_machine(job, sets)
    assert load_for_this_machine(job, sets[:1]).spec.trainer.processes_per_pod == 1
    chosen = [*sets, "spec.trainer.processesPerPod=2"]
    assert load_for_this_machine(job, chosen).spec.trainer.processes_per_pod == 2
    with pytest.raises(InvalidManifest, match=r"3 does not divide .* processesPerPod \(4\)"):
        load_manifest(job, [*sets, "spec.trainer.contextParallel=3"])


def test_a_status_from_a_cluster_is_ignored(job: Path) -> None:
    job.write_text(GOOD + "status: {state: Unheard, later: 1}\n")
    assert load_manifest(job).status is None


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (
            ["--set", "spec.rollout.minReplicas=3"],
            "job.yaml:26 spec.rollout.maxReplicas: 2 is less than minReplicas (3)\n",
        ),
        (
            ["--set", "spec.rollout.maxReplica=3"],
            "--set spec.rollout.maxReplica: unknown field; did you mean maxReplicas?\n",
        ),
        (["--set", "spec.recipe.code.path=gone"], "--set spec.recipe.code.path: no such folder: gone\n"),
    ],
)
def test_the_command_refuses_with_status_2_and_no_traceback(job: Path, arguments: list[str], fault: str) -> None:
    done = polyrl("validate", "job.yaml", *arguments, cwd=job.parent)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", fault)


def test_the_command_says_what_is_valid_and_what_it_did_not_check(job: Path) -> None:
    done = polyrl("validate", "job.yaml", "--set", "spec.suspend=false", cwd=job.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "job.yaml is valid: sort, mode sft+rl, 4 SFT and 4 RL steps, 0 to 2 rollouts",
        "note: on this machine spec.suspend has no effect (cluster only)",
    ]


def test_what_is_valid_is_said_by_the_steps_of_its_stages(job: Path) -> None:
    (job.parent / "pairs.jsonl").write_text('{"prompt": "1", "chosen": "1", "rejected": "2"}\n')
    sets = ["spec.recipe.mode=dpo", "spec.recipe.dpo.steps=7", 'spec.recipe.data.preferences=[{"path": "pairs.jsonl"}]']
    (first, *_) = validation_report(job, sets, check=False)
    assert first.endswith("job.yaml is valid: sort, mode dpo, 7 DPO steps, 0 to 2 rollouts")


def test_absolute_paths_belong_to_the_machine_that_trains(job: Path) -> None:
    elsewhere = ["spec.recipe.data.rl[0].path=/no/such/rows.jsonl"]
    assert "no such file" in refusal(job, *elsewhere)[0]
    done = polyrl("validate", "job.yaml", "--set", elsewhere[0], cwd=job.parent)
    assert done.returncode == 0
    assert "note: not on this machine, so not checked: /no/such/rows.jsonl" in done.stdout


def test_help_is_quick_because_it_loads_nothing_heavy() -> None:
    program = (
        "import sys\nfrom polyrl_cli.app import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('pydantic', 'yaml', 'numpy', 'torch', 'kopf', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(command in done.stdout for command in ("validate", "run", "crd", "version"))


def test_the_crd_command_writes_both_files_or_says_why_not(tmp_path: Path) -> None:
    assert polyrl("crd", "--out", "new/crd.yaml", cwd=tmp_path).returncode == 0
    assert (tmp_path / "new/crd.yaml").read_text() == polyrl("crd", cwd=tmp_path).stdout
    assert polyrl("crd", "--docs", cwd=tmp_path).stdout.startswith("# Manifest reference")
    refused = polyrl("crd", "--out", "new", cwd=tmp_path)
    assert (refused.returncode, refused.stderr) == (2, "new: cannot be written (Is a directory)\n")


STATUSES = [
    ("polyrl.errors.InvalidData('rows.jsonl:3: no prompt')", 2, "rows.jsonl:3: no prompt\n"),
    ("polyrl.errors.RunFailed('the manager did not start')", 1, "the manager did not start\n"),
    ("KeyboardInterrupt()", 130, ""),
]


@pytest.mark.parametrize(("raised", "status", "stderr"), STATUSES)
def test_errors_become_exit_statuses(raised: str, status: int, stderr: str) -> None:
    program = (
        "import polyrl.errors\nfrom polyrl_cli.app import app\n"
        f"@app.command()\ndef fail() -> None:\n    raise {raised}\n"
        "app(['fail'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (status, stderr)


@pytest.mark.parametrize("installed", [True, False])
def test_validate_says_what_reaches_an_object_store(
    job: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    """An image without it failed in its first seconds, once a cluster had found it a GPU."""
    monkeypatch.setattr(load, "find_spec", lambda name: object() if installed else None)
    sets = ["spec.recipe.model={path: 's3://bucket/model'}", "spec.recipe.checkpoint.uri=gs://bucket/runs"]
    found = [line for line in validation_report(job, sets, check=False) if "EXTRA" in line]
    here = ["", ""] if installed else [f"; here it needs pip install 'polyrl[{name}]'" for name in ("s3", "gcs")]
    image = "the trainer's image reaches"
    assert found == [
        f'note: spec.recipe.model.path: {image} s3:// only if it was built with EXTRA="trainer s3"{here[0]}',
        f'note: spec.recipe.checkpoint.uri: {image} gs:// only if it was built with EXTRA="trainer gcs"{here[1]}',
    ]
    assert not any("EXTRA" in line for line in validation_report(job, [], check=False))
