"""Where a trainer's pod has its model and rows from: its image, a claim, or what an init container fetches."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.cluster.resources.fixed import fixed_children
from polyrl.cluster.resources.owner import Owner, Settings
from polyrl.cluster.resources.workers import trainer_job
from polyrl.manifest.job import PolyRLJob

SETTINGS = Settings("registry/manager:1", "registry/trainer:1", rollout_image="registry/rollout:1")
RECIPE = {
    "mode": "rl",
    "data": {"rl": [{"path": "rl.jsonl"}]},
    "reward": {"function": "reward:score"},
    "algorithm": {"steps": 1},
}


def pod_of(model: dict[str, Any], **spec: Any) -> dict[str, Any]:
    trainer: dict[str, Any] = trainer_job(owner(model, **spec))["spec"]["template"]["spec"]
    return trainer


def owner(model: dict[str, Any], **spec: Any) -> Owner:
    recipe = RECIPE | {"model": model} | spec.pop("recipe", {})
    manifest = {"apiVersion": "polyrl.dev/v1alpha1", "kind": "PolyRLJob", "metadata": {"name": "job"}}
    job = PolyRLJob.model_validate({**manifest, "spec": {"recipe": recipe, **spec}})
    return Owner("job", "ns", "uid", job, settings=SETTINGS)


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def mounts(container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["mountPath"]: one for one in container["volumeMounts"]}


def test_a_folder_is_neither_fetched_nor_mounted() -> None:
    pod = pod_of({"path": "models/tiny/deep"})
    assert "initContainers" not in pod
    assert not {"/polyrl/fetched", "/polyrl/model"} & mounts(pod["containers"][0]).keys()


@pytest.mark.parametrize("path", ["owner/name", "hf://owner/name@main", "s3://bucket/models/x", "gs://bucket/x"])
def test_what_is_elsewhere_is_fetched_before_the_trainer_by_whoever_has_the_credentials(path: str) -> None:
    model = {"path": path, "secretRef": "account"}
    pod = pod_of(model, recipe={"envSecret": "judge", "code": {"configMap": "code"}})
    (fetch,), trainer = pod["initContainers"], pod["containers"][0]
    assert fetch["name"] == "fetch"
    assert fetch["command"][:3] == ["python", "-m", "polyrl_trainer.fetch"]
    assert fetch["envFrom"] == [{"secretRef": {"name": "judge"}}, {"secretRef": {"name": "account"}}]
    assert trainer["envFrom"] == [{"secretRef": {"name": "judge"}}], "user code runs there"
    assert fetch["securityContext"]["readOnlyRootFilesystem"]
    for container in (fetch, trainer):
        found = variables(container)
        assert found["POLYRL_FETCHED"] == "/polyrl/fetched"
        assert found["HF_HOME"] == "/polyrl/fetched/huggingface"
        assert [one["name"] for one in container["env"]].count("HF_HOME") == 1
        assert {"/polyrl/fetched", "/polyrl/job", "/polyrl/manifest", "/tmp"} <= mounts(container).keys()
    assert not [path for path in mounts(fetch) if path in ("/polyrl/engine-keys", "/polyrl/run")]


@pytest.mark.parametrize("reports", [True, False], ids=["a manager", "no manager"])
def test_a_fetch_tells_the_manager_if_there_is_one_and_has_keys_for_nothing_else(reports: bool) -> None:
    sft = {} if reports else {"mode": "sft", "data": {"sft": [{"path": "x.jsonl"}]}, "sft": {"steps": 1}}
    sft |= {} if reports else {"reward": None, "algorithm": {"steps": None}}
    (fetch,) = pod_of({"path": "owner/name"}, recipe=sft)["initContainers"]
    words = ["--manager-endpoints", "/polyrl/job/manager.json", "--pod", "$(POLYRL_POD_NAME)"]
    words += ["--keys", "/polyrl/keys/trainer.key"]
    assert fetch["command"][7:] == (words if reports else [])
    assert ("/polyrl/keys" in mounts(fetch)) is reports
    assert ("POLYRL_POD_NAME" in [one["name"] for one in fetch["env"]]) is reports


def test_a_users_image_variables_and_cache_are_those_of_the_fetch_but_not_its_gpus() -> None:
    cache = {"name": "cache", "mountPath": "/polyrl/fetched"}
    first = {
        "name": "x",
        "image": "own:1",
        "env": [{"name": "HF_ENDPOINT", "value": "https://mirror"}],
        "volumeMounts": [cache],
        "resources": {"limits": {"nvidia.com/gpu": 1}},
    }
    volumes = [{"name": "cache", "hostPath": {"path": "/var/cache/models"}}]
    template = {
        "spec": {"containers": [first], "volumes": volumes, "initContainers": [{"name": "theirs", "image": "y"}]}
    }
    pod = pod_of({"path": "owner/name"}, trainer={"template": template})
    theirs, fetch = pod["initContainers"]
    assert (theirs["name"], fetch["name"], fetch["image"]) == ("theirs", "fetch", "own:1")
    assert variables(fetch)["HF_ENDPOINT"] == "https://mirror"
    assert mounts(fetch)["/polyrl/fetched"] == cache
    assert "limits" not in fetch["resources"]


ROWS = {"rl": [{"path": "here.jsonl"}, {"path": "hf://datasets/o/n@main/train.parquet"}], "secretRef": "rows"}


def test_rows_that_are_elsewhere_are_fetched_beside_a_model_that_is_a_folder_or_a_claim() -> None:
    for path, at in (("models/tiny", None), ("pvc://models/tiny", "/polyrl/model")):
        pod = pod_of({"path": path, "secretRef": "rows"}, recipe={"data": ROWS})
        (fetch,), trainer = pod["initContainers"], pod["containers"][0]
        assert fetch["envFrom"] == [{"secretRef": {"name": "rows"}}], "once"
        assert "envFrom" not in trainer
        for container in (fetch, trainer):
            assert variables(container)["POLYRL_FETCHED"] == "/polyrl/fetched"
            assert variables(container).get("POLYRL_MODEL_CLAIM") == at
            assert mounts(container).keys() >= {"/polyrl/fetched", *([at] if at else [])}


def test_accounts_of_model_and_rows_are_those_of_the_fetch() -> None:
    (fetch,) = pod_of({"path": "s3://b/m", "secretRef": "model"}, recipe={"data": ROWS})["initContainers"]
    assert fetch["envFrom"] == [{"secretRef": {"name": "model"}}, {"secretRef": {"name": "rows"}}]


def test_a_claim_is_mounted_to_be_read() -> None:
    pod = pod_of({"path": "pvc://models/qwen"})
    assert "initContainers" not in pod
    trainer = pod["containers"][0]
    assert mounts(trainer)["/polyrl/model"]["readOnly"]
    assert variables(trainer)["POLYRL_MODEL_CLAIM"] == "/polyrl/model"
    assert {"claimName": "models", "readOnly": True} in [one.get("persistentVolumeClaim") for one in pod["volumes"]]


@pytest.mark.parametrize(
    ("path", "opened"),
    [("s3://b/p", True), ("hf://o/n", True), ("pvc://c/p", False)],
    ids=["of a store", "of a Hub", "of a claim"],
)
def test_what_is_fetched_opens_the_way_out_by_https(path: str, opened: bool) -> None:
    policies = [one for one in fixed_children(owner({"path": path})) if one["kind"] == "NetworkPolicy"]
    ports = [
        port.get("port")
        for one in policies
        if one["metadata"]["name"] == "job-trainer"
        for rule in one["spec"]["egress"]
        for port in rule.get("ports", [])
    ]
    assert (443 in ports) is opened
