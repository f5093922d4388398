"""The pod that reads an ended job's volume: it may run where the trainer did, and is none of the job's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from polyrl.cluster import names
from polyrl.cluster.resources.owner import Owner, Settings
from polyrl.cluster.resources.workers import trainer_job
from polyrl.errors import UserError
from polyrl.manifest.job import PolyRLJob
from polyrl_cli.remote.reader_pod import reader_pod, waits_for

EXAMPLE = Path(__file__).parents[4] / "examples/sort-digits/job.yaml"
SETTINGS = Settings(manager_image="m", trainer_image="t", rollout_image="r")
TEMPLATE = {
    "spec": {
        "tolerations": [{"key": "reserved", "operator": "Exists"}],
        "imagePullSecrets": [{"name": "pull"}],
        "containers": [{"name": "trainer", "image": "mine", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
    }
}


def reader(storage: dict[str, Any] | None = None) -> dict[str, Any]:
    manifest = yaml.safe_load(EXAMPLE.read_text())
    manifest["spec"]["trainer"] |= {"template": TEMPLATE, "storage": storage or {}}
    owner = Owner("job", "ns", "uid", PolyRLJob.model_validate(manifest), SETTINGS)
    stored = manifest | {"metadata": {"name": "job", "namespace": "ns", "uid": "uid"}}
    return reader_pod(stored, trainer_job(owner))


def test_it_is_of_the_trainers_kind_without_devices_keys_or_writing() -> None:
    spec = reader()["spec"]
    container = spec["containers"][0]
    assert container["image"] == "mine"
    assert [mount["readOnly"] for mount in container["volumeMounts"]] == [True]
    assert [volume["persistentVolumeClaim"]["claimName"] for volume in spec["volumes"]] == ["job-trainer"]
    assert {"key": "reserved", "operator": "Exists"} in spec["tolerations"]
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    assert spec["securityContext"]["runAsUser"] == names.USER_ID
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert "nvidia" not in str(container)
    assert not spec["automountServiceAccountToken"]
    assert 0 < spec["activeDeadlineSeconds"] <= 3600


def test_nothing_of_the_operators_selects_it_and_it_ends_with_the_job() -> None:
    metadata = reader()["metadata"]
    ours = (names.LABEL_MANAGED_BY, names.LABEL_JOB, names.LABEL_ROLE)
    assert not metadata["labels"].keys() & set(ours)
    assert [(owner["name"], owner["uid"]) for owner in metadata["ownerReferences"]] == [("job", "uid")]
    assert metadata["name"].startswith("job-reader-")
    assert metadata["name"] != reader()["metadata"]["name"]


def test_a_claim_of_the_users_is_read_in_the_jobs_own_folder() -> None:
    spec = reader({"claimName": "mine"})["spec"]
    assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == "mine"
    assert spec["containers"][0]["volumeMounts"][0]["subPath"] == "uid"


def test_what_ended_with_its_pod_is_said_to_be_gone() -> None:
    with pytest.raises(UserError, match="ended with the trainer's pod"):
        reader({"ephemeral": True})


WAITING = {"state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}


@pytest.mark.parametrize(
    ("pod", "sentence"),
    [
        ({}, "it is not there"),
        ({"status": {"phase": "Pending"}}, "it is Pending"),
        ({"status": {"phase": "Pending", "conditions": [UNSCHEDULABLE]}}, "0/3 nodes are available"),
        ({"status": {"containerStatuses": [WAITING], "conditions": [UNSCHEDULABLE]}}, "ErrImagePull: no such image"),
    ],
)
def test_why_it_waits(pod: dict[str, Any], sentence: str) -> None:
    assert waits_for(pod) == sentence
