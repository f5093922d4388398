"""What people do with kubectl, against a real API server: apply, get, explain, scale, wait; and what it stores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyrl.manifest.job import PolyRLJob

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/sort-digits/job.yaml"
JOB = "/apis/polyrl.dev/v1alpha1/namespaces/default/polyrljobs/sort-digits"

STATUS: dict[str, Any] = {
    "observedGeneration": 1,
    "state": "Running",
    "trainer": {"ready": 1},
    "rollout": {
        "replicas": 3, "registeredReplicas": 2, "desiredReplicas": 3, "spotReplicas": 2, "preemptions": 7,
        "selector": "polyrl.dev/job-name=sort-digits",
    },
    "manager": {"step": 41, "endpoint": "https://sort-digits-manager:5000"},
    "scaling": {"gapMillis": -120},
    "conditions": [
        {"type": "CapacityLimited", "status": "True", "reason": "SpotUnavailable", "message": "no spot",
         "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1},
        {"type": "Complete", "status": "True", "reason": "Completed", "message": "",
         "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1},
    ],
}  # fmt: skip


@pytest.fixture
def stored(server: Any) -> Iterator[Any]:
    """The example, applied by kubectl, with a status."""
    applied = server.kubectl("apply", "-f", EXAMPLE)
    assert applied.returncode == 0, applied.stderr
    written = server.request("PATCH", f"{JOB}/status", {"status": STATUS}, content="application/merge-patch+json")
    assert written[0] == 200, written
    yield server
    server.kubectl("delete", "prl", "sort-digits", "--ignore-not-found")


def test_a_bad_manifest_is_refused_at_dry_run(server: Any) -> None:
    text = EXAMPLE.read_text().replace("maxReplicas: 2", "maxReplicas: 2000")
    refused = server.kubectl("apply", "--dry-run=server", "-f", "-", given=text)
    assert refused.returncode != 0
    assert "spec.rollout.maxReplicas" in refused.stderr


def test_get_shows_the_job_in_one_line(stored: Any) -> None:
    narrow = stored.kubectl("get", "prl", "sort-digits").stdout.splitlines()
    assert " ".join(narrow[0].split()) == "NAME STATE TRAINER ROLLOUT DESIRED MAX SPOT PREEMPTED STEP AGE"
    assert " ".join(narrow[1].split()[:-1]) == "sort-digits Running 1 2 3 2 2 7 41"
    wide = stored.kubectl("get", "polyrl", "-o", "wide").stdout
    assert "-120" in wide
    assert "SpotUnavailable" in wide
    assert "https://sort-digits-manager:5000" in wide


def test_jobs_are_not_among_all(stored: Any) -> None:
    assert "sort-digits" not in stored.kubectl("get", "all").stdout


@pytest.mark.parametrize("path", ["polyrljob.spec.rollout", "polyrljob.spec.recipe.algorithm", "prl.status.rollout"])
def test_explain_knows_the_fields(stored: Any, path: str) -> None:
    explained = stored.kubectl("explain", path)
    assert explained.returncode == 0, explained.stderr
    assert "FIELDS:" in explained.stdout
    assert "<no description>" not in explained.stdout


def test_every_field_of_the_spec_is_explained(server: Any) -> None:
    explained = server.kubectl("explain", "polyrljob.spec", "--recursive")
    assert explained.stdout.count("<") > 150


def test_scale_writes_replicas_and_reads_the_status(stored: Any) -> None:
    scaled = stored.kubectl("scale", "prl/sort-digits", "--replicas=1")
    assert scaled.returncode == 0, scaled.stderr
    _, scale = stored.request("GET", f"{JOB}/scale")
    assert scale["spec"]["replicas"] == 1
    assert scale["status"] == {"replicas": 3, "selector": "polyrl.dev/job-name=sort-digits"}


def test_wait_sees_the_condition(stored: Any) -> None:
    waited = stored.kubectl("wait", "prl/sort-digits", "--for=condition=Complete", "--timeout=30s")
    assert waited.returncode == 0, waited.stderr


def test_status_is_apart_from_spec(stored: Any) -> None:
    _, before = stored.request("GET", JOB)
    ignored = {"status": {"state": "Failed"}, "spec": {"backoffLimit": 4}}
    stored.request("PATCH", JOB, ignored, content="application/merge-patch+json")
    _, after = stored.request("GET", JOB)
    assert after["status"] == before["status"], "a write of the job does not touch its status"
    assert after["metadata"]["generation"] == before["metadata"]["generation"] + 1
    stored.request("PATCH", f"{JOB}/status", {"status": {"state": "Degraded"}}, content="application/merge-patch+json")
    _, last = stored.request("GET", JOB)
    assert last["metadata"]["generation"] == after["metadata"]["generation"], "a status is no new generation"


def test_what_is_stored_means_what_was_written(stored: Any) -> None:
    _, raw = stored.request("GET", JOB)
    kept = PolyRLJob.model_validate(raw)
    written = PolyRLJob.model_validate(yaml.safe_load(EXAMPLE.read_text()))
    assert kept.spec == written.spec
    assert kept.status is not None
    assert kept.status.rollout.preemptions == 7


def test_the_crd_reports_no_trouble(server: Any) -> None:
    raw = server.kubectl("get", "crd", "polyrljobs.polyrl.dev", "-o", "json").stdout
    conditions = {c["type"]: c["status"] for c in json.loads(raw)["status"]["conditions"]}
    assert conditions.get("NonStructuralSchema", "False") == "False"
    assert conditions["Established"] == "True"


def test_a_second_apply_changes_nothing(stored: Any) -> None:
    _, before = stored.request("GET", JOB)
    assert stored.kubectl("apply", "-f", EXAMPLE).returncode == 0
    _, after = stored.request("GET", JOB)
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
