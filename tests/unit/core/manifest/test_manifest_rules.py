"""Manifests drawn from the schema: rules say the same in Python and in CEL, and what is valid survives JSON and YAML.

Specs are drawn from the schema itself, so a new field is in these tests the day it is declared. Failures print seeds.
"""

from __future__ import annotations

import json
import random
import re
from copy import deepcopy
from typing import Any

import celpy
import pytest
import yaml
from celpy import celtypes
from celpy.adapter import json_to_cel
from hypothesis import example, given, settings, strategies as st

from polyrl.errors import InvalidManifest
from polyrl.manifest.job import API_VERSION, KIND, PolyRLJob
from polyrl.manifest.rules.between_fields import RULES, broken_rules
from polyrl.manifest.rules.transitions import TRANSITIONS
from polyrl.manifest.schema.crd import OPEN, Schema, manifest_schema
from polyrl.manifest.spec import JobSpec
from polyrl_cli.manifests.load import job_of
from polyrl_cli.manifests.yaml_source import parse

TEXTS = {
    "trackingUri": ["http://mlflow:5000"],
    "uri": ["s3://bucket/place", "gs://bucket", "file:///place"],
    "path": [
        "rows.jsonl",
        "OWNER/NAME",
        "s3://bucket/rows.jsonl",
        "hf://datasets/a/b@main/c.parquet",
        "s3://bucket/../x.jsonl",
    ],
    "function": ["reward:score", "pkg.reward:score"],
    "filterFunction": ["filters:keep"],
    "lossFunction": ["losses:sapo"],
    "advantageFunction": ["losses:best"],
    "classPath": ["tools:Calculator"],
    "currency": ["USD", "EUR"],
    "cidr": ["10.0.0.0/8"],
    "size": ["10Gi"],
    "name": ["a", "a-b", "X_TOKEN", "POLYRL_X"],
    "args": ["--tp-size=2", "--quantization", "--nnodes", "--pp-size", "2", "--device"],
    "alphabet": ["", "ab", "aa", "abca", "äöü"],
}
"""Values of fields that have a pattern, and of those whose value matters to a rule."""

NUMBERS = {"port": [5000, 5002], "maxNewTokens": [1, 1024], "maxTurns": [8, 200], "topK": [-1, -1, -1, 0, 20]}
"""A port that is free in pods, and one that is not; answers that leave room for a prompt, and some that do not; turns
whose rewards may all be reported, and more of them; tokens to draw from, mostly all."""

MODEL_CONFIGS = [{"model_type": "qwen2"}, {"model_type": "llama", "hidden_size": 8, "pad_token_id": None}]
SPREAD = 4
"""Numbers are drawn from the lowest few allowed: small ones meet each other, and so the rules' edges."""


def random_spec(seed: int) -> dict[str, Any]:
    """A spec whose fields are each valid; rules between them may be broken."""
    return _object(manifest_schema()["properties"]["spec"], "spec", random.Random(seed))


def manifest(spec: dict[str, Any]) -> dict[str, Any]:
    """A whole manifest around a spec."""
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "drawn"}, "spec": spec}


def _value(node: Schema, name: str, rng: random.Random) -> Any:
    if "enum" in node:
        return rng.choice(node["enum"])
    if name == "config":
        return rng.choice(MODEL_CONFIGS)
    draw = {"object": _object, "array": _array, "string": _string, "boolean": _boolean}.get(node["type"], _number)
    return draw(node, name, rng)


def _object(node: Schema, name: str, rng: random.Random) -> dict[str, Any]:
    required = node.get("required", ())
    given = [key for key in node.get("properties", {}) if key in required or rng.random() < 0.6]
    made = {key: _value(node["properties"][key], key, rng) for key in given}
    return made | ({"further": {"x": [1, None, "y"]}} if OPEN in node and rng.random() < 0.3 else {})


def _array(node: Schema, name: str, rng: random.Random) -> list[Any]:
    least = node.get("minItems", 0)
    size = rng.randint(least, min(node["maxItems"], least + 2))
    return [_value(node["items"], name, rng) for _ in range(size)]


def _string(node: Schema, name: str, rng: random.Random) -> str:
    texts = TEXTS.get(name, ["x", "data/x.jsonl"])
    return rng.choice([text for text in texts if re.search(node.get("pattern", ""), text)])


def _boolean(node: Schema, name: str, rng: random.Random) -> bool:
    return rng.random() < 0.5


def _number(node: Schema, name: str, rng: random.Random) -> float:
    if name in NUMBERS:
        return rng.choice(NUMBERS[name])
    if node["type"] == "integer":
        return rng.randint(node["minimum"], min(node["maximum"], node["minimum"] + SPREAD))
    low, high = float(node["minimum"]), float(node["maximum"])
    drawn = rng.choice([low, low + (high - low) / 4, low + (high - low) / 2])
    return drawn if drawn > low or not node.get("exclusiveMinimum") else high / 2


def plain(job: PolyRLJob | JobSpec) -> Any:
    return job.model_dump(mode="json", by_alias=True, exclude_none=True)


def _first(text: str, part: str) -> celtypes.IntType:
    return celtypes.IntType(text.find(part))


def _last(text: str, part: str) -> celtypes.IntType:
    return celtypes.IntType(text.rfind(part))


def _split(text: str, separator: str) -> celtypes.ListType:
    assert separator == "", "only this form is used"
    return celtypes.ListType([celtypes.StringType(character) for character in text])


def _format(template: str, values: celtypes.ListType) -> celtypes.StringType:
    return celtypes.StringType(template % tuple(values))


# The API server's string library, which the Python evaluator lacks.
EXTENSIONS: dict[str, Any] = {"split": _split, "indexOf": _first, "lastIndexOf": _last, "format": _format}
ENVIRONMENT = celpy.Environment()


def program(expression: str) -> celpy.Runner:
    return ENVIRONMENT.program(ENVIRONMENT.compile(expression), functions=EXTENSIONS)


PROGRAMS = {rule.id: program(rule.cel) for rule in RULES}
MESSAGES = {rule.id: program(rule.message_expression()) for rule in RULES if "{" in rule.message}
CHANGES = {change.id: program(change.cel) for change in TRANSITIONS}


def disagreements(spec: JobSpec) -> list[str]:
    """Rules on which Python and CEL differ for this spec, in verdict or in words."""
    facts = {"self": json_to_cel(plain(spec))}
    found = []
    for rule in RULES:
        holds = rule.holds(spec)
        if bool(PROGRAMS[rule.id].evaluate(facts)) != holds:
            found.append(f"{rule.id}: Python says {holds}")
        elif not holds and rule.id in MESSAGES and str(MESSAGES[rule.id].evaluate(facts)) != rule.sentence(spec):
            found.append(f"{rule.id}: {MESSAGES[rule.id].evaluate(facts)!r} is not {rule.sentence(spec)!r}")
    return found


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_python_and_cel_agree_on_any_spec(seed: int) -> None:
    assert disagreements(JobSpec.model_validate(random_spec(seed))) == []


def test_every_rule_is_seen_to_hold_and_to_break() -> None:
    specs = [JobSpec.model_validate(random_spec(seed)) for seed in range(1200)]
    for rule in RULES:
        assert {rule.holds(spec) for spec in specs} == {True, False}, rule.id


@pytest.mark.parametrize(("samples", "holds"), [(1, False), (2, True)], ids=["one", "two"])
def test_a_filter_by_spread_needs_samples_to_compare_whatever_the_advantage_does(samples: int, holds: bool) -> None:
    algorithm = {"name": "ppo", "oldLogProbs": "recompute", "groupFilter": "nonzeroSpread", "steps": 1}
    manifest = {**VALID["recipe"], "algorithm": algorithm, "sampling": {"samplesPerPrompt": samples}}
    spec = JobSpec.model_validate(VALID | {"recipe": manifest})
    assert disagreements(spec) == []
    assert ("filtered-by-spread" not in {rule.id for rule, _ in broken_rules(spec)}) is holds


@pytest.mark.parametrize(
    ("field", "value", "holds"),
    [
        ("temperature", 0, True),
        ("temperature", 1e-40, False),  # the learner's logits overflow
        ("temperature", 1e-7, False),  # SGLang draws greedily and reports logprobs at temperature 1
        ("temperature", 0.01, True),
        ("topK", -1, True),
        ("topK", 0, False),  # SGLang refuses every request
        ("topK", 1, True),
    ],
    ids=str,
)
def test_what_engines_would_draw_differently_from_what_the_learner_scores_is_refused(
    field: str, value: float, holds: bool
) -> None:
    sets = [{"name": "a", "data": [{"path": "e.jsonl"}], "sampling": {field: value}}]
    places = {"sampling": {field: value}, "evaluation.sampling": {field: value}, "evaluation.sets": sets}
    for place, setting in places.items():
        spec = JobSpec.model_validate(changed(f"recipe.{place}", setting))
        assert disagreements(spec) == []
        broken = {rule.id for rule, _ in broken_rules(spec)}
        assert ("sampling-understood" not in broken) is holds, place


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "broken"),
    [
        pytest.param({"correctionHigh": 5.0}, {"bound-of-a-correction"}, id="bypass corrects nothing"),
        pytest.param({"correctionHigh": 5.0, "oldLogProbs": "recompute"}, set(), id="recompute truncates by default"),
        pytest.param({"correctionHigh": 5.0, "correction": "tokenMask"}, set(), id="a mask has two bounds"),
        pytest.param({"correctionLow": 0.5, "correction": "tokenMask"}, set(), id="a mask has two bounds, the low one"),
        pytest.param({"correctionLow": 0.5, "oldLogProbs": "reuse"}, {"bound-of-a-mask"}, id="truncation has one"),
        pytest.param({"klPlace": "reward"}, {"penalty-weighs"}, id="a penalty in the reward, of no weight"),
        pytest.param({"klEstimator": "k2"}, {"penalty-weighs"}, id="a penalty in the loss, of no weight"),
        pytest.param({"klEstimator": "k2", "klCoefficient": 0.1}, set(), id="a penalty"),
        pytest.param({"critic": {"gamma": 0.9}}, {"critic-learns"}, id="no critic"),
        pytest.param({"critic": {"warmupSteps": 0}}, set(), id="nothing said of a critic"),
        pytest.param({"name": "ppo", "critic": {"gamma": 0.9}}, set(), id="a critic"),
        pytest.param(
            {"name": "ppo", "advantageFunction": "a:b", "critic": {"gamma": 0.9}},
            {"critic-learns"},
            id="an own advantage",
        ),
        pytest.param({"oldLogProbs": "reuse", "clipHigh": 0.3}, {"clips-a-ratio"}, id="of 1, and its clip"),
        pytest.param({"oldLogProbs": "reuse", "dualClip": 2.0}, {"clips-a-ratio"}, id="of 1, and its dual clip"),
        pytest.param({"oldLogProbs": "reuse", "name": "dapo"}, set(), id="a ratio of 1, and a name's clip"),
        pytest.param({"clipHigh": 0.3}, set(), id="a clip"),
        pytest.param({"name": "cispo", "dualClip": 2.0}, {"dual-clip-bounds"}, id="cispo, which cuts a weight"),
        pytest.param({"policyLoss": "cispo", "dualClip": 2.0}, {"dual-clip-bounds"}, id="the loss of cispo"),
        pytest.param({"lossFunction": "a:b", "dualClip": 2.0}, {"dual-clip-bounds"}, id="an own loss"),
        pytest.param({"name": "cispo", "policyLoss": "clip", "dualClip": 2.0}, set(), id="cispo by name alone"),
        pytest.param({"name": "cispo", "klCoefficient": 0.1, "dualClip": 2.0}, set(), id="the ratio of a penalty"),
        pytest.param(
            {"name": "cispo", "klCoefficient": 0.1, "klEstimator": "k2", "dualClip": 2.0},
            {"dual-clip-bounds"},
            id="a penalty without a ratio",
        ),
        pytest.param(
            {"name": "cispo", "klCoefficient": 0.1, "klPlace": "reward", "dualClip": 2.0},
            {"dual-clip-bounds"},
            id="a penalty in the reward, without a ratio",
        ),
        pytest.param(
            {"klCoefficient": 0.1, "klPlace": "reward", "klEstimator": "k2"},
            {"penalty-estimated"},
            id="a penalty in the reward is by k1",
        ),
        pytest.param({"klCoefficient": 0.1, "klPlace": "reward"}, set(), id="a penalty in the reward"),
        pytest.param({"maxFilteredGroupsPerStep": 5}, {"filtered-groups-bounded"}, id="nothing filters"),
        pytest.param({"maxFilteredGroupsPerStep": 5, "groupFilter": "anySuccess"}, set(), id="a filter"),
    ],
)
def test_what_is_said_of_a_part_of_the_loss_that_is_not_there_is_refused(
    algorithm: dict[str, Any], broken: set[str]
) -> None:
    spec = JobSpec.model_validate(VALID | {"recipe": {**VALID["recipe"], "algorithm": {"steps": 1, **algorithm}}})
    assert disagreements(spec) == []
    of_numbers = {"bound-of-a-correction", "bound-of-a-mask", "penalty-weighs", "critic-learns", "clips-a-ratio"}
    of_numbers |= {"dual-clip-bounds", "penalty-estimated", "filtered-groups-bounded"}
    assert {rule.id for rule, _ in broken_rules(spec)} & of_numbers == broken


@pytest.mark.parametrize(
    ("mode", "evaluation", "broken"),
    [
        pytest.param("sft", "everySteps", {"eval-steps-generate"}, id="no RL steps"),
        pytest.param("sft", "everySftSteps", set(), id="SFT steps"),
        pytest.param("sft+rl", "everySteps", set(), id="RL steps of both"),
        pytest.param("sft+rl", "everySftSteps", set(), id="SFT steps of both"),
        pytest.param("rl", "everySteps", set(), id="RL steps"),
        pytest.param("rl", "everySftSteps", {"eval-steps-supervised"}, id="no SFT steps"),
    ],
)
def test_evaluations_between_steps_that_a_mode_does_not_take_are_refused(
    mode: str, evaluation: str, broken: set[str]
) -> None:
    recipe = {**VALID["recipe"], "mode": mode, "evaluation": {evaluation: 5}}
    spec = JobSpec.model_validate(VALID | {"recipe": recipe})
    assert disagreements(spec) == []
    of_steps = {"eval-steps-generate", "eval-steps-supervised"}
    assert {rule.id for rule, _ in broken_rules(spec)} & of_steps == broken


def test_rules_and_transitions_have_names_of_their_own_and_blame_fields_that_exist() -> None:
    checks = [*RULES, *TRANSITIONS]
    assert len({check.id for check in checks}) == len(checks)
    for check in checks:
        node = manifest_schema()["properties"]["spec"]
        for key in check.field:
            node = node["properties"][key]


VALID = {
    "recipe": {
        "mode": "sft+rl",
        "model": {"config": {"model_type": "qwen2"}, "tokenizer": {"type": "characters", "alphabet": "ab"}},
        "data": {"sft": [{"path": "s.jsonl"}], "rl": [{"path": "r.jsonl"}]},
        "sft": {"steps": 1},
        "algorithm": {"steps": 1},
        "reward": {"function": "reward:score"},
    },
    "rollout": {"engine": {"type": "embedded"}, "maxReplicas": 8},
}


def mended(spec: dict[str, Any]) -> dict[str, Any]:
    """The spec with every field that a broken rule reads put as in VALID, or left out, until no rule complains."""
    for _ in range(len(RULES)):
        broken = [rule for rule, _ in broken_rules(JobSpec.model_validate(spec))]
        if not broken:
            return spec
        for path in (path for rule in broken for path in rule.fields_read()):
            _mend(spec, VALID, path)
    raise AssertionError(f"cannot be mended: {spec}")


def _mend(spec: Any, valid: Any, path: tuple[str, ...]) -> None:
    for key in path[:-1]:
        if key not in valid:
            break
        spec, valid = spec.setdefault(key, {}), valid[key]
    else:
        key = path[-1]
    if key in valid:
        spec[key] = deepcopy(valid[key])
    else:
        spec.pop(key, None)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_a_valid_job_survives_json_and_yaml(seed: int) -> None:
    job = PolyRLJob.model_validate(manifest(mended(random_spec(seed))))
    assert PolyRLJob.model_validate_json(json.dumps(plain(job))) == job
    assert job_of(parse(yaml.safe_dump(plain(job), allow_unicode=True), "drawn.yaml")) == job


def changed(path: str, value: Any, **more: Any) -> dict[str, Any]:
    spec: dict[str, Any] = deepcopy(VALID) | more
    node = spec
    *parents, leaf = path.split(".")
    for key in parents:
        node = node.setdefault(key, {})
    node[leaf] = value
    return dict(plain(JobSpec.model_validate(spec)))


BEFORE = plain(JobSpec.model_validate(VALID))
SUSPENDED = changed("suspend", True)
LIMITED = changed("activeDeadlineSeconds", 60)


def without(part: str, name: str, spec: dict[str, Any] = BEFORE) -> dict[str, Any]:
    return spec | {part: {key: value for key, value in spec[part].items() if key != name}}


LATER = without("trainer", "processesPerPod", LIMITED)
TRANSITION_TABLE = [
    ("managedBy-fixed", BEFORE, changed("managedBy", "other.dev/operator"), False),
    ("port-fixed", BEFORE, changed("manager.port", 6000), False),
    ("manager-storage-fixed", BEFORE, changed("manager.storage", {"ephemeral": True}), False),
    ("trainer-storage-fixed", BEFORE, changed("trainer.storage", {"claimName": "disk"}), False),
    ("leaseSeconds-fixed", BEFORE, changed("rollout.leaseSeconds", 5), False),
    ("lostAfterSeconds-fixed", BEFORE, changed("rollout.lostAfterSeconds", 30), False),
    ("mode-fixed", BEFORE, changed("recipe.mode", "sft"), False),
    ("seed-fixed", BEFORE, changed("recipe.seed", 1), False),
    ("replicas-fixed-while-running", BEFORE, changed("trainer.replicas", 2), False),
    ("replicas-fixed-while-running", SUSPENDED, changed("trainer.replicas", 2), True),
    ("processesPerPod-fixed-while-running", BEFORE, changed("trainer.processesPerPod", 2), False),
    ("processesPerPod-fixed-while-running", BEFORE, without("trainer", "processesPerPod"), False),
    ("processesPerPod-fixed-while-running", without("trainer", "processesPerPod"), BEFORE, False),
    ("processesPerPod-fixed-while-running", without("trainer", "processesPerPod"), LATER, True),
    ("contextParallel-fixed-while-running", BEFORE, changed("trainer.contextParallel", 2), False),
    ("fsdp-fixed-while-running", BEFORE, changed("trainer.fsdp", {"dpReplicate": 1, "cpuOffload": "all"}), False),
    ("capacity-fixed-while-running", BEFORE, changed("trainer.capacity", "Any"), False),
    ("reservedEngine-fixed-while-running", BEFORE, changed("trainer.reservedEngine", False), False),
    ("reservedSleep-fixed-while-running", BEFORE, changed("trainer.reservedSleep", "never"), False),
    ("graceSeconds-fixed-while-running", BEFORE, changed("trainer.graceSeconds", 60), False),
    ("reservedMemFraction-fixed-while-running", BEFORE, changed("trainer.reservedMemFraction", 0.2), False),
    ("deadline-only-shrinks", BEFORE, LIMITED, True),
    ("deadline-only-shrinks", LIMITED, changed("activeDeadlineSeconds", 30), True),
    ("deadline-only-shrinks", LIMITED, changed("activeDeadlineSeconds", 90), False),
    ("deadline-only-shrinks", LIMITED, BEFORE, False),
]


@pytest.mark.parametrize(
    ("change", "before", "after", "allowed"), TRANSITION_TABLE, ids=[row[0] for row in TRANSITION_TABLE]
)
def test_a_stored_job_refuses_what_cannot_change(change: str, before: Any, after: Any, allowed: bool) -> None:
    facts = {"self": json_to_cel(after), "oldSelf": json_to_cel(before)}
    assert bool(CHANGES[change].evaluate(facts)) is allowed


def test_every_transition_stands_in_the_table_and_allows_no_change_at_all() -> None:
    assert {row[0] for row in TRANSITION_TABLE} == CHANGES.keys()
    facts = {"self": json_to_cel(BEFORE), "oldSelf": json_to_cel(BEFORE)}
    assert all(bool(change.evaluate(facts)) for change in CHANGES.values())


def test_replicas_out_of_bounds_are_left_to_the_operator() -> None:
    spec = deepcopy(VALID) | {"rollout": {"engine": {"type": "embedded"}, "replicas": 9, "maxReplicas": 2}}
    assert PolyRLJob.model_validate(manifest(spec)).spec.rollout.replicas == 9


LINE = re.compile(r"^(drawn\.yaml(:\d+)?|--set)[: ]")


def refusal(text: str) -> list[str]:
    """The lines with which a text is refused; nothing when it is a manifest. Any other exception fails the test."""
    try:
        source = parse(text, "drawn.yaml")
        if not isinstance(source.data, dict):
            return []
        job_of(source)
    except InvalidManifest as error:
        return error.faults
    return []


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200) | st.text(alphabet="-:[]{}&*!|>'\"%@`#,? \n\tab01", max_size=80))
def test_any_text_is_refused_in_whole_lines(text: str) -> None:
    assert all(LINE.match(line) and "\n" not in line for line in refusal(text))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), JUNK, JUNK)
@example(73341, {"\n": None}, None)
def test_junk_in_place_of_any_field_is_refused_in_whole_lines(seed: int, junk: Any, key: Any) -> None:
    job = manifest(random_spec(seed))
    rng = random.Random(seed)
    node: Any = job
    while True:
        at = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        if not isinstance(node[at], dict | list) or not node[at] or rng.random() < 0.3:
            break
        node = node[at]
    node[at] = junk
    if isinstance(node, dict):
        node[str(key)] = junk
    assert all(LINE.match(line) and "\n" not in line for line in refusal(yaml.safe_dump(job, allow_unicode=True)))
