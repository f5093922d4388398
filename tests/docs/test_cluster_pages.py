"""Pages about clusters: their YAML is what they say it is, and they name all that the code has.

Blocks marked `sh cluster` need a cluster; tests/e2e/test_docs_on_cluster.py runs them there.
"""

from __future__ import annotations

import ast
import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from polyrl.cluster import names
from polyrl.cluster.reasons import AcceptedReason, ConditionReason, EventReason, FailureReason, ScalingReason
from polyrl.manifest.job import PolyRLJob
from polyrl.manifest.spec import JobSpec
from polyrl.manifest.status import DisruptionKind, RunState

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")])
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCES = {"", "sh", "sh cluster", "text", "console", "python", "yaml", "json"}
REFERENCE = ROOT / "docs/reference/cluster.md"
CORE = ROOT / "core/polyrl/cluster"
SHELL = ROOT / "operator/polyrl_operator"

FIELDS = {field.alias for field in JobSpec.model_fields.values()}

BASE: dict[str, Any] = {
    "apiVersion": "polyrl.dev/v1alpha1",
    "kind": "PolyRLJob",
    "metadata": {"name": "a"},
    "spec": {
        "recipe": {
            "model": {"path": "m"},
            "data": {"rl": [{"path": "r.jsonl"}]},
            "algorithm": {"steps": 1000},
            "sampling": {"maxNewTokens": 64},
            "reward": {"function": "reward:score"},
        }
    },
}


def blocks(label: str) -> list[tuple[str, str]]:
    """Place and text of every block with this label."""
    return [
        (f"{page.relative_to(ROOT)}:{page.read_text().count(chr(10), 0, match.start()) + 1}", match[2])
        for page in PAGES
        for match in FENCE.finditer(page.read_text())
        if match[1] == label
    ]


def documents() -> list[tuple[str, Any]]:
    return [(f"{where}", one) for where, text in blocks("yaml") for one in yaml.safe_load_all(text)]


def test_every_block_says_what_it_is() -> None:
    for page in PAGES:
        labels = {match[1] for match in FENCE.finditer(page.read_text())}
        assert labels <= FENCES, f"{page}: a shell block is `sh`, and tested, or `text`"


def test_cluster_blocks_are_run_on_a_cluster() -> None:
    runner = (ROOT / "tests/e2e/test_docs_on_cluster.py").read_text()
    pages = {where.split(":")[0] for where, _ in blocks("sh cluster")}
    assert pages
    assert all(page in runner for page in pages)


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    made = deepcopy(base)
    for key, value in more.items():
        both = isinstance(value, dict) and isinstance(made.get(key), dict)
        made[key] = merged(made[key], value) if both else value
    return made


def values_of(document: dict[str, Any]) -> Any:
    """The chart's values, also within what Argo CD and Flux are given; the chart lies where these say."""
    spec = document.get("spec", {})
    if document.get("kind") == "HelmRelease":
        assert (ROOT / spec["chart"]["spec"]["chart"] / "Chart.yaml").is_file()
        return spec["values"]
    if document.get("kind") == "Application":
        return spec["source"].get("helm", {}).get("valuesObject", {})
    return document


@pytest.mark.parametrize(("where", "document"), documents(), ids=lambda given: given if isinstance(given, str) else "")
def test_yaml_is_what_it_says_it_is(where: str, document: Any) -> None:
    schema = json.loads((ROOT / "charts/polyrl/values.schema.json").read_text())
    if document.keys() <= FIELDS:
        document = {"spec": document}
    if document.get("kind") == "PolyRLJob":
        PolyRLJob.model_validate(document, by_alias=True, by_name=False)
    elif document.keys() == {"spec"}:
        PolyRLJob.model_validate(merged(BASE, document), by_alias=True, by_name=False)
    elif document.keys() <= schema["properties"].keys() or document.get("kind") in ("Application", "HelmRelease"):
        document = values_of(document)
        jsonschema.validate(json.loads(json.dumps(document).replace("sha256:...", "sha256:" + "a" * 64)), schema)
    else:
        assert {"apiVersion", "kind", "metadata"} <= document.keys(), where


def literals(*files: Path, pattern: str) -> set[str]:
    return {word for file in files for word in re.findall(pattern, file.read_text())}


def strings(*files: Path) -> set[str]:
    """Whole string constants of the code; what docstrings quote is none."""
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def missing(words: set[str]) -> set[str]:
    page = REFERENCE.read_text()
    return {word for word in words if not re.search(rf"\b{re.escape(word)}\b", page)}


def test_the_reference_names_every_condition_and_reason() -> None:
    types = {text for text in strings(CORE / "reporting/conditions.py") if re.fullmatch(r"([A-Z][a-z]+)+", text)}
    every = (AcceptedReason, ScalingReason, FailureReason, ConditionReason, DisruptionKind)
    reasons = {reason.value for kind in every for reason in kind}
    ordinary = {"Valid", "Ready", "Registered", "StepAdvanced", "Measured", "Idle", "TrainerComplete", "TrainerFailed"}
    assert len(types) > 10
    assert missing((types | reasons) - ordinary - {"True", "False"}) == set()


def test_the_reference_names_every_event() -> None:
    assert missing({reason.value for reason in EventReason}) == set()


def test_the_reference_names_every_label_and_annotation() -> None:
    keys = {value for key, value in vars(names).items() if key.startswith(("LABEL_", "ANNOTATION_"))}
    page = REFERENCE.read_text()
    assert {key for key in keys if key not in page} == set()


def test_the_reference_names_every_metric() -> None:
    words = literals(*SHELL.rglob("*.py"), pattern=r'"(polyrl_[a-z_]+)"')
    page = REFERENCE.read_text()
    assert len(words) > 10
    assert {word for word in words if word not in page} == set()


def test_the_health_checks_for_gitops_know_every_state() -> None:
    every = {state.value for state in RunState}
    (argo,) = (text for where, text in blocks("yaml") if "health.polyrl.dev_PolyRLJob" in text)
    assert set(re.findall(r"^      (\w+) = \"", argo, re.MULTILINE)) == every
    (flux,) = (document["spec"] for _, document in documents() if "healthCheckExprs" in document.get("spec", {}))
    named = {word for text in flux["healthCheckExprs"][0].values() for word in re.findall(r"'(\w+)'", text)}
    assert named < every
