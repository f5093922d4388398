"""A real API server takes every child of a job in a namespace that enforces Pod Security `restricted`."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyrl.cluster.resources.fixed import fixed_children
from polyrl.cluster.resources.owner import Owner, Settings
from polyrl.cluster.resources.workers import manager_pod, rollout_pod, trainer_job
from polyrl.manifest.job import PolyRLJob
from polyrl.sample import Pool
from polyrl_cli.remote.reader_pod import reader_pod

CHART = Path(__file__).parents[3] / "charts/polyrl"
LONGEST = 46
"""Characters of a job's name."""
SETTINGS = Settings("registry/manager:1", "registry/trainer:1", rollout_image="registry/rollout:1")
PATHS = {
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "Service": "/api/v1/namespaces/{}/services",
    "PersistentVolumeClaim": "/api/v1/namespaces/{}/persistentvolumeclaims",
    "Pod": "/api/v1/namespaces/{}/pods",
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
}
TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"team": "blue"}},
    "spec": {
        "containers": [
            {
                "name": "ours",
                "resources": {"limits": {"nvidia.com/gpu": 1, "cpu": "250m"}},
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                "env": [{"name": "HOME", "value": "/data"}],
            },
            {"name": "logs", "image": "logs:1"},
        ],
        "volumes": [{"name": "data", "emptyDir": {}}],
        "nodeSelector": {"zone": "a"},
    },
}
RULES = [
    {"action": "Count", "onExitCodes": {"operator": "NotIn", "values": [0, 1]}},
    {"action": "Ignore", "onPodConditions": [{"type": "NodeGone"}]},
]


def manifest(preset: str, **spec: Any) -> dict[str, Any]:
    recipe = {
        "mode": "rl",
        "code": {"configMap": "files"},
        "model": {"path": "model"},
        "data": {"rl": [{"path": "rl.jsonl"}]},
        "reward": {"function": "reward:score"},
        "algorithm": {"steps": 1},
    }
    wanted = {
        "recipe": recipe,
        "networkPolicy": {"publicHttps": "Always", "extraEgress": [{"cidr": "10.0.0.0/8"}]},
        **spec,
    }
    wanted["rollout"] = {**spec.get("rollout", {}), "capacity": {"preset": preset}}
    return {"apiVersion": "polyrl.dev/v1alpha1", "kind": "PolyRLJob", "metadata": {"name": "job"}, "spec": wanted}


@pytest.fixture(scope="module")
def namespace(api_server: Any) -> str:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "children", "labels": labels}}
    assert api_server.request("POST", "/api/v1/namespaces", body)[0] == 201
    return "children"


@pytest.mark.parametrize("preset", ["None", "Karpenter", "GKE", "AKS", "EKSManaged"])
@pytest.mark.parametrize("theirs", [{}, {"template": TEMPLATE}], ids=["plain", "templates"])
def test_every_child_is_taken(api_server: Any, namespace: str, preset: str, theirs: dict[str, Any]) -> None:
    parts = {"trainer": theirs, "manager": theirs, "rollout": theirs, "failurePolicy": {"rules": RULES}}
    job = PolyRLJob.model_validate(manifest(preset, **parts))
    owner = Owner("job", namespace, "6b8c1f0e-0000-4000-8000-000000000000", job=job, settings=SETTINGS)
    pods = [rollout_pod(owner, 3, pool) for pool in (Pool.SPOT, Pool.ON_DEMAND)]
    made = [*fixed_children(owner), manager_pod(owner, 1), trainer_job(owner), *pods]
    assert {child["kind"] for child in made} == PATHS.keys()
    for child in made:
        path = PATHS[child["kind"]].format(namespace) + "?dryRun=All&fieldValidation=Strict"
        status, answer = api_server.request("POST", path, child)
        assert status == 201, f"{child['kind']} {child['metadata']['name']}: {answer}"


def test_the_trainers_pod_is_held_to_the_same(api_server: Any, namespace: str) -> None:
    """Of a Job only its pods are checked, later and out of sight; so here they are checked as pods."""
    for theirs, reserved in itertools.product(({}, {"template": TEMPLATE}), (True, False)):
        job = PolyRLJob.model_validate(manifest("GKE", trainer={**theirs, "reservedEngine": reserved}))
        template = trainer_job(Owner("job", namespace, "uid", job=job, settings=SETTINGS))["spec"]["template"]
        body = {"apiVersion": "v1", "kind": "Pod", **template}
        body["metadata"] = {**body["metadata"], "name": "trainer"}
        path = PATHS["Pod"].format(namespace) + "?dryRun=All&fieldValidation=Strict"
        status, answer = api_server.request("POST", path, body)
        assert status == 201, answer


@pytest.mark.parametrize("theirs", [{}, {"template": TEMPLATE}], ids=["plain", "templates"])
def test_the_pod_that_reads_an_ended_jobs_volume_is_taken(
    api_server: Any, namespace: str, theirs: dict[str, Any]
) -> None:
    name = "n" * LONGEST
    raw = manifest("GKE", trainer=theirs) | {"metadata": {"name": name, "namespace": namespace, "uid": "uid"}}
    job = PolyRLJob.model_validate(raw)
    trainer = trainer_job(Owner(name, namespace, "uid", job=job, settings=SETTINGS))
    path = PATHS["Pod"].format(namespace) + "?dryRun=All&fieldValidation=Strict"
    status, answer = api_server.request("POST", path, reader_pod(raw, trainer))
    assert status == 201, answer


@pytest.mark.parametrize("values", [[], ["replicas=2", "metrics.monitors.enabled=true", "log.level=debug"]], ids=str)
def test_the_operators_own_pods_are_taken(
    api_server: Any, namespace: str, helm_program: str, values: list[str]
) -> None:
    command: list[str | Path] = [helm_program, "template", "polyrl", CHART, "-n", namespace, "--kube-version", "1.36.3"]
    command += ["--set=images.prefix=registry.example.org/"]
    command += [part for value in values for part in ("--set", value)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    objects = [one for one in yaml.safe_load_all(text) if one]
    (deployment,) = (one for one in objects if one["kind"] == "Deployment")
    of_operator = {"apiVersion": "v1", "kind": "Pod", **deployment["spec"]["template"]}
    of_operator["metadata"] = {**of_operator["metadata"], "name": "operator"}
    of_test = [one for one in objects if one["kind"] == "Pod"]
    assert of_test, "helm test has a pod"
    for pod in (of_operator, *of_test):
        path = PATHS["Pod"].format(namespace) + "?dryRun=All&fieldValidation=Strict"
        status, answer = api_server.request("POST", path, pod)
        assert status == 201, answer


def test_a_job_with_the_longest_name_has_all_its_children(api_server: Any, namespace: str) -> None:
    name = "n" * LONGEST
    job = PolyRLJob.model_validate(manifest("None") | {"metadata": {"name": name}})
    owner = Owner(name, namespace, "6b8c1f0e-0000-4000-8000-000000000000", job=job, settings=SETTINGS)
    pods = [rollout_pod(owner, 10**9, Pool.SPOT), manager_pod(owner, 10**7)]
    for child in (*fixed_children(owner), trainer_job(owner), *pods):
        path = PATHS[child["kind"]].format(namespace) + "?dryRun=All&fieldValidation=Strict"
        status, answer = api_server.request("POST", path, child)
        assert status == 201, f"{child['kind']} {child['metadata']['name']}: {answer}"
