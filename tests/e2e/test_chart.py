"""The chart's life on a real cluster, by the real Helm: install, test, upgrade, roll back, uninstall, rights.

One release is used, that of the whole suite; it is there again, as this checkout has it, when a test is over.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.port import BedFailed, Cluster
from cluster.tools import Kubectl, call, eventually
from on_cluster import release
from on_cluster.job import short_job
from on_cluster.settings import OPERATOR_NAMESPACE, RELEASE, ROLES, ROOT, image

CHART = ROOT / "charts/polyrl"
CRD = "polyrljobs.polyrl.dev"
HELM_S = 240.0
GONE_S = 60.0
ACCOUNT = f"system:serviceaccount:{OPERATOR_NAMESPACE}:polyrl-operator"


def helm(bed: Cluster, *args: str) -> str:
    return call("helm", *args, "--namespace", OPERATOR_NAMESPACE, timeout_s=HELM_S, kubeconfig=bed.kubeconfig)


@pytest.fixture
def installed(bed: Cluster) -> Iterator[Kubectl]:
    """The release in a namespace that enforces Pod Security `restricted`; what a test did to it is undone."""
    everywhere = Kubectl(bed.kubeconfig, OPERATOR_NAMESPACE)
    release.install(bed.kubeconfig)
    everywhere("label", "namespace", OPERATOR_NAMESPACE, "pod-security.kubernetes.io/enforce=restricted", "--overwrite")
    everywhere("delete", "pods", "-l", "app.kubernetes.io/component=operator")
    everywhere("rollout", "status", "deployment/polyrl-operator", "--timeout=120s", timeout_s=125)
    yield everywhere
    release.install(bed.kubeconfig)


def test_helm_test_passes_in_a_restricted_namespace(bed: Cluster, installed: Kubectl) -> None:
    output = helm(bed, "test", RELEASE, "--timeout", "120s")
    assert re.search(r"Phase:\s+Succeeded", output), output
    assert not installed.items("pods", "-l", "app.kubernetes.io/component=test"), "the test pod is gone when it passed"


def changed_chart(folder: Path) -> Path:
    """This chart one version later: its CRD knows one field more."""
    chart = folder / "polyrl"
    shutil.copytree(CHART, chart)
    meta = yaml.safe_load((chart / "Chart.yaml").read_text()) | {"version": "0.1.1"}
    (chart / "Chart.yaml").write_text(yaml.safe_dump(meta))
    crd = yaml.safe_load((chart / "files/polyrljobs.yaml").read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    spec["addedLater"] = {"type": "string", "maxLength": 8}
    (chart / "files/polyrljobs.yaml").write_text(yaml.safe_dump(crd))
    return chart


def crd_knows_field(kubectl: Kubectl) -> bool:
    crd = kubectl.json("crd", CRD)
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    return "addedLater" in spec


def test_upgrade_brings_a_changed_crd_and_rollback_takes_it_back(
    bed: Cluster, installed: Kubectl, kubectl: Kubectl, tmp_path: Path
) -> None:
    job = short_job("kept", steps=400)
    job["spec"]["suspend"] = True
    kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(job))
    uid = kubectl.json("prl", "kept")["metadata"]["uid"]
    before = json.loads(helm(bed, "history", RELEASE, "-o", "json"))[-1]["revision"]
    values = [part for role in ROLES for part in ("--set", f"images.{role}={image(role)}")]
    helm(bed, "upgrade", RELEASE, str(changed_chart(tmp_path)), *values, "--wait", "--timeout", "180s")
    assert crd_knows_field(installed)
    kubectl("patch", "prl", "kept", "--type=merge", "-p", '{"spec":{"addedLater":"yes"}}')
    assert kubectl.json("prl", "kept")["spec"]["addedLater"] == "yes"
    helm(bed, "rollback", RELEASE, str(before), "--wait", "--timeout", "180s")
    assert not crd_knows_field(installed)
    assert kubectl.json("prl", "kept")["metadata"]["uid"] == uid, "the job has stayed"


def left_over(kubectl: Kubectl) -> list[str]:
    """Objects of any kind that carry the release's label."""
    kinds: list[str] = []
    for namespaced in ("true", "false"):
        kinds += kubectl("api-resources", "--verbs=list", f"--namespaced={namespaced}", "-o", "name").split()
    dynamic = ("events", "events.events.k8s.io", "pods.metrics.k8s.io", "nodes.metrics.k8s.io", "componentstatuses")
    wanted = ",".join(kind for kind in kinds if kind not in dynamic)
    selector = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component=operator"
    return kubectl("get", wanted, "-A", "-l", selector, "-o", "name", "--ignore-not-found").split()


def test_uninstall_leaves_what_jobs_need_and_says_so(bed: Cluster, installed: Kubectl, kubectl: Kubectl) -> None:
    job = short_job("kept")
    job["spec"]["suspend"] = True
    kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(job))
    output = helm(bed, "uninstall", RELEASE, "--wait", "--timeout", "120s")
    assert f"[CustomResourceDefinition] {CRD}" in output
    kept = [f"priorityclass.scheduling.k8s.io/polyrl-{role}" for role in ("rollout", "trainer")]
    kept += [f"customresourcedefinition.apiextensions.k8s.io/{CRD}"]
    eventually("nothing else is left", lambda: sorted(left_over(installed)) == sorted(kept), GONE_S)
    assert kubectl.json("prl", "kept")["metadata"].get("finalizers") is None
    kubectl("delete", "prl", "kept", "--timeout=30s")
    kubectl("delete", "namespace", kubectl.namespace, "--timeout=60s", timeout_s=65)
    release.install(bed.kubeconfig)
    kubectl("create", "namespace", kubectl.namespace)


NARROW = ("watch.nodes=false", "crds.install=false", "priorityClasses.create=false", "rbac.aggregate=false")
"""Nothing that is cluster-scoped."""


def test_an_operator_in_namespaced_mode_has_roles_only(bed: Cluster, installed: Kubectl, kubectl: Kubectl) -> None:
    mine = f"narrow-{kubectl.namespace}"
    values = [f"watch.namespaces={{{kubectl.namespace}}}", *NARROW, *(f"images.{role}={image(role)}" for role in ROLES)]
    given = [part for value in values for part in ("--set", value)]
    place = ("--namespace", kubectl.namespace)
    call("helm", "install", mine, str(CHART), *place, *given, "--wait", "--timeout", "120s", timeout_s=HELM_S,
         kubeconfig=bed.kubeconfig)  # fmt: skip
    try:
        account = f"system:serviceaccount:{kubectl.namespace}:{mine}-polyrl-operator"
        assert can(installed, account, "create", "pods", kubectl.namespace)
        assert not can(installed, account, "create", "pods", "default")
        assert not can(installed, account, "list", "nodes", None)
    finally:
        call("helm", "uninstall", mine, *place, timeout_s=HELM_S, kubeconfig=bed.kubeconfig)


def can(kubectl: Kubectl, account: str, verb: str, resource: str, namespace: str | None) -> bool:
    kind, _, part = resource.partition("/")
    place = (["-n", namespace] if namespace else []) + ([f"--subresource={part}"] if part else [])
    try:
        return kubectl("auth", "can-i", verb, kind, f"--as={account}", *place).strip() == "yes"
    except BedFailed as refused:
        if "exit 1: " not in str(refused):
            raise
        return False


MAY: list[tuple[str, str]] = [
    ("list", "polyrljobs.polyrl.dev"), ("patch", "polyrljobs.polyrl.dev/status"), ("watch", "nodes"),
    ("create", "pods"), ("delete", "pods"), ("create", "jobs.batch"), ("create", "configmaps"),
    ("create", "secrets"), ("get", "secrets"),
]  # fmt: skip
MAY_NOT: list[tuple[str, str]] = [
    ("update", "polyrljobs.polyrl.dev"), ("patch", "polyrljobs.polyrl.dev"), ("list", "secrets"), ("watch", "secrets"),
    ("delete", "secrets"), ("create", "pods/exec"), ("create", "pods/attach"), ("create", "clusterroles"),
    ("create", "roles"), ("impersonate", "users"), ("delete", "nodes"), ("patch", "nodes"), ("delete", "namespaces"),
    ("create", "serviceaccounts/token"), ("delete", "persistentvolumes"), ("create", "deployments.apps"),
]  # fmt: skip


def test_the_operator_may_do_what_it_does_and_no_more(installed: Kubectl) -> None:
    assert [one for one in MAY if not can(installed, ACCOUNT, *one, "default")] == []
    assert [one for one in MAY_NOT if can(installed, ACCOUNT, *one, "default")] == []


READ_METRICS = """
import ssl, sys, urllib.request
asked = urllib.request.Request("https://127.0.0.1:8080/metrics", headers={"Authorization": "Bearer " + sys.argv[1]})
print(urllib.request.urlopen(asked, timeout=10, context=ssl._create_unverified_context()).read().decode())
"""


def test_every_request_of_the_operator_was_granted(installed: Kubectl) -> None:
    """Counts by verb and resource, from its metrics: whatever it has asked so far."""
    reader, role = f"{OPERATOR_NAMESPACE}:default", f"{OPERATOR_NAMESPACE}:polyrl-operator-metrics-reader"
    installed("create", "clusterrolebinding", "metrics-of-tests", f"--clusterrole={role}", f"--serviceaccount={reader}")
    try:
        token = installed("create", "token", "default").strip()
        text = installed("exec", "deployment/polyrl-operator", "--", "python", "-c", READ_METRICS, token)
    finally:
        installed("delete", "clusterrolebinding", "metrics-of-tests")
    counts: dict[str, Any] = {}
    for line in text.splitlines():
        if found := re.match(r'polyrl_api_requests_total\{code="(\w+)",resource="([^"]*)",verb="(\w+)"\} (\S+)', line):
            counts[f"{found[3]} {found[2]} {found[1]}"] = float(found[4])
    assert any(key.endswith("2xx") for key in counts), "it has asked something"
    print(json.dumps(counts, indent=1))
    refused = installed("logs", "deployment/polyrl-operator", "--tail=-1")
    assert "is forbidden" not in refused
