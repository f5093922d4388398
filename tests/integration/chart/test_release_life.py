"""A release's life on a bare API server, by the real Helm: what jobs need outlives it, and who comes next has it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHART = Path(__file__).parents[3] / "charts/polyrl"
IMAGES = "--set=images.prefix=registry.example.org/polyrl/"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/polyrljobs.polyrl.dev"
CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
NAMESPACES = ("team-a", "team-b", "polyrl-system")
HELM_S = 120
Release = Callable[..., str]


@pytest.fixture
def release(api_server: Any, helm_program: str) -> Iterator[Release]:
    """Runs the real Helm on a release `polyrl`, which is gone afterwards."""
    for name in NAMESPACES:
        assert api_server.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})[0] in (201, 409)

    def run(verb: str, *args: str | Path) -> str:
        place = ["--namespace", "polyrl-system", "--kubeconfig", api_server.kubeconfig()]
        command = [helm_program, verb, "polyrl", *args, *place]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HELM_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    yield run
    run("uninstall", "--ignore-not-found")
    for name in ("polyrl-trainer", "polyrl-rollout", "other-trainer"):
        api_server.request("DELETE", f"{CLASSES}/{name}")


def install(release: Release, *values: str) -> None:
    """Or upgrades to these values; the CRD may be there by another hand."""
    given = [f"--set-json={value}" for value in values]
    release("upgrade", "--install", "--take-ownership", CHART, IMAGES, *given)


def trainer_pod(server: Any, priority_class: str) -> tuple[int, Any]:
    """What the job controller hears that makes a lost trainer's pod anew, from a template that names this class."""
    container = {"name": "trainer", "image": "t"}
    pod = {"metadata": {"name": "t"}, "spec": {"containers": [container], "priorityClassName": priority_class}}
    answer: tuple[int, Any] = server.request("POST", "/api/v1/namespaces/team-a/pods?dryRun=All", pod)
    return answer


@pytest.mark.parametrize(
    "change", ["uninstall", 'priorityClasses.trainer="other-trainer"', "priorityClasses.create=false"]
)
def test_a_trainer_that_runs_comes_back_whatever_becomes_of_the_release(
    api_server: Any, release: Release, change: str
) -> None:
    install(release)
    assert trainer_pod(api_server, "polyrl-trainer")[0] == 201
    if change == "uninstall":
        release("uninstall")
    else:
        install(release, change)
    status, answer = trainer_pod(api_server, "polyrl-trainer")
    assert status == 201, answer
    install(release)
    assert api_server.request("GET", f"{CLASSES}/polyrl-trainer")[1]["value"] == 1000


def test_the_crd_stays_whoever_brings_it(api_server: Any, release: Release) -> None:
    install(release)
    uid = api_server.request("GET", CRD)[1]["metadata"]["uid"]
    install(release, "crds.install=false")
    assert api_server.request("GET", CRD)[1]["metadata"]["uid"] == uid
    install(release)
    release("uninstall")
    assert api_server.request("GET", CRD)[1]["metadata"]["uid"] == uid
    install(release)
    assert api_server.request("GET", CRD)[1]["metadata"]["uid"] == uid


def test_rights_follow_the_namespaces_and_leave_with_them(api_server: Any, release: Release) -> None:
    for namespaces in ([], ["team-a"], ["team-a", "team-b"], ["team-b"], []):
        install(release, f"watch.namespaces={json.dumps(namespaces)}")
        status, _ = api_server.request("GET", f"{RBAC}/clusterroles/polyrl-system:polyrl-operator")
        assert (status == 200) is (not namespaces)
        for name in ("team-a", "team-b"):
            status, _ = api_server.request("GET", f"{RBAC}/namespaces/{name}/rolebindings/polyrl-operator")
            assert (status == 200) is (name in namespaces)
    release("uninstall")
    own = ("polyrl-system", "team-a", "team-b")  # others' tests have releases on this server, too
    for path in ("clusterroles", "clusterrolebindings", "roles", "rolebindings"):
        left = [one["metadata"] for one in api_server.request("GET", f"{RBAC}/{path}")[1]["items"]]
        places = [one.get("namespace", one["name"].partition(":")[0]) for one in left if "polyrl" in one["name"]]
        assert not {*places} & {*own}
