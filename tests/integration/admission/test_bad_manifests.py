"""What a real API server refuses, each time naming the field, and what it takes.

Every case is written down in a file beside this one; a refusal is asked for as `kubectl apply --dry-run=server` asks.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyrl.cluster.acceptance import unsupported
from polyrl.cluster.observation.job import job_facts
from polyrl.manifest.job import PolyRLJob
from polyrl.manifest.rules.between_fields import RULES
from polyrl.manifest.rules.transitions import TRANSITIONS

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
JOBS = "/apis/polyrl.dev/v1alpha1/namespaces/default/polyrljobs"
STRICT = "fieldValidation=Strict"
"""As kubectl asks: unknown fields are refused, not dropped."""

BASE: dict[str, Any] = yaml.safe_load((ROOT / "examples/sort-digits/job.yaml").read_text())
BAD: list[dict[str, Any]] = yaml.safe_load((HERE / "bad_manifests.yaml").read_text())
UNSUPPORTED: list[dict[str, Any]] = yaml.safe_load((HERE / "unsupported_manifests.yaml").read_text())
CHANGES: list[dict[str, Any]] = yaml.safe_load((HERE / "bad_changes.yaml").read_text())


def changed(base: dict[str, Any], values: dict[str, Any], dropped: list[str] | None = None) -> dict[str, Any]:
    made = deepcopy(base)
    for path in dropped or []:
        node, leaf = _parent(made, path)
        del node[leaf]
    for path, value in values.items():
        node, leaf = _parent(made, path)
        node[leaf] = value
    return made


def _parent(made: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    *parents, leaf = path.split(".")
    node = made
    for key in parents:
        node = node.setdefault(key, {})
    return node, leaf


def refusal_names(answer: dict[str, Any], field: str) -> bool:
    causes = answer.get("details", {}).get("causes", [])
    return field in [cause.get("field") for cause in causes] or f'unknown field "{field}"' in answer["message"]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case["id"])
def test_a_bad_manifest_is_refused_by_the_field(server: Any, case: dict[str, Any]) -> None:
    body = changed(BASE, case.get("set", {}), case.get("drop"))
    status, answer = server.request("POST", f"{JOBS}?dryRun=All&{STRICT}", body)
    assert status in (400, 422), answer
    assert refusal_names(answer, case["field"]), answer
    assert case.get("says", "") in answer["message"]


@pytest.mark.parametrize("case", UNSUPPORTED, ids=lambda case: case["id"])
def test_what_cannot_be_run_yet_is_taken_and_then_refused_by_the_field(server: Any, case: dict[str, Any]) -> None:
    body = changed(BASE, case["set"])
    status, answer = server.request("POST", f"{JOBS}?dryRun=All&{STRICT}", body)
    assert status == 201, answer
    assert unsupported(PolyRLJob.model_validate(answer)).startswith(f"{case['field']}: ")


def test_gpus_that_the_server_cannot_see_are_counted_by_the_operator(server: Any) -> None:
    pod = {"spec": {"containers": [{"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": 4}}}]}}
    for slices, refused in ((2, []), (3, ["spec.trainer.contextParallel: 3 does not divide the processes that learn"])):
        body = changed(BASE, {"spec.trainer": {"contextParallel": slices, "template": pod}})
        status, answer = server.request("POST", f"{JOBS}?dryRun=All&{STRICT}", body)
        assert status == 201, answer
        assert "processesPerPod" not in answer["spec"]["trainer"]
        facts = job_facts(answer, pods=(), trainer=None, nodes={}, claims=(), children=(), manager=None, dry_run=None)
        assert [facts.refusal[: len(words)] for words in refused] == refused
        assert (facts.job is None) == bool(refused)


@pytest.mark.parametrize("case", CHANGES, ids=lambda case: case["id"])
def test_a_stored_job_refuses_the_change_by_the_field(server: Any, case: dict[str, Any]) -> None:
    name = f"change-{case['id']}"
    before = changed(BASE, case.get("from", {}) | {"metadata.name": name})
    status, stored = server.request("POST", f"{JOBS}?{STRICT}", before)
    assert status == 201, stored
    after = changed(BASE, case["to"] | {"metadata": stored["metadata"]})
    status, answer = server.request("PUT", f"{JOBS}/{name}?dryRun=All&{STRICT}", after)
    assert status == 422, answer
    assert refusal_names(answer, case["field"]), answer
    suspended = changed(BASE, case.get("from", {}) | {"metadata": stored["metadata"], "spec.suspend": True})
    status, answer = server.request("PUT", f"{JOBS}/{name}?dryRun=All&{STRICT}", suspended)
    assert status == 200, answer


def test_there_are_sixty_and_every_rule_is_among_them() -> None:
    assert len(BAD) >= 60
    named = {case["field"] for case in BAD}
    assert {f"spec.{rule.path}" for rule in RULES} <= named
    assert {f"spec.{change.path}" for change in TRANSITIONS} <= {case["field"] for case in CHANGES}


@pytest.mark.parametrize("file", sorted(ROOT.glob("examples/*/job.yaml")), ids=lambda file: file.parent.name)
def test_the_examples_are_taken(server: Any, file: Path) -> None:
    status, answer = server.request("POST", f"{JOBS}?dryRun=All&{STRICT}", yaml.safe_load(file.read_text()))
    assert status == 201, answer


def test_replicas_out_of_bounds_are_left_to_the_operator(server: Any) -> None:
    body = changed(BASE, {"spec.rollout.replicas": 9})
    status, answer = server.request("POST", f"{JOBS}?dryRun=All&{STRICT}", body)
    assert status == 201, answer
