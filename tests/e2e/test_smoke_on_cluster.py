"""The whole way once, small: install, train, lose a machine, complete, uninstall, and nothing is left but the CRD and
the PriorityClasses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster.port import Cluster
from cluster.tools import Kubectl, eventually
from on_cluster import release
from on_cluster.audit import assert_nothing_lost, read_report
from on_cluster.command import printed_by
from on_cluster.faults import Victims, kill_node
from on_cluster.job import Manifest, Run, short_job
from on_cluster.settings import OPERATOR_NAMESPACE, RELEASE, image

STEPS = 60
STEP = 2
GONE_S = 60.0
"""Helm returns while the operator's pod still ends."""
INSIDE = "pods,services,deployments,configmaps,secrets,serviceaccounts,roles,rolebindings,leases"
EVERYWHERE = "clusterroles,clusterrolebindings"
NATIVE = {"configmap/kube-root-ca.crt", "serviceaccount/default"}
"""What every namespace has."""


@pytest.mark.timeout(1200)
def test_install_train_lose_a_machine_complete_uninstall(whole_bed: Cluster, kubectl: Kubectl, tmp_path: Path) -> None:
    release.install(whole_bed.kubeconfig)
    run = Run(kubectl, with_a_sidecar(short_job("smoke", STEPS)))
    run.apply()
    run.await_step(STEP)
    seen_live(run, tmp_path / "report.html")
    kill_node(Victims(whole_bed, kubectl, run=run))
    run.await_complete()
    eventually("the trainer's machine is free", lambda: have_ended(run.pods("trainer")), GONE_S)
    print(kubectl("get", "prl"))
    assert_nothing_lost(read_report(kubectl, run.name))
    taken_home(run, tmp_path / "fetched")
    run.delete()
    release.uninstall(whole_bed.kubeconfig)
    eventually("nothing of the release is left", lambda: not left_behind(whole_bed), GONE_S)
    kept = "crd/polyrljobs.polyrl.dev", "priorityclass/polyrl-rollout", "priorityclass/polyrl-trainer"
    assert len(Kubectl(whole_bed.kubeconfig)("get", *kept, "-o", "name").split()) == len(kept)


def with_a_sidecar(job: Manifest) -> Manifest:
    """Something runs beside the trainer that does not end by itself."""
    beside = {"name": "beside", "image": image("trainer"), "command": ["sleep", "infinity"]}
    job["spec"].setdefault("trainer", {})["template"] = {"spec": {"containers": [{"name": "trainer"}, beside]}}
    return job


def have_ended(pods: list[Manifest]) -> bool:
    """No container of theirs runs any more, though one would by itself."""
    beside = [one["name"] for pod in pods for one in pod["spec"]["initContainers"]]
    return "beside" in beside and all(pod["status"]["phase"] in ("Succeeded", "Failed") for pod in pods)


def seen_live(run: Run, page: Path) -> None:
    """`top` and `report` have the run while it goes on."""
    shown = printed_by(run.kubectl, "top", run.name, "--on", "kubernetes", "--once")
    assert run.name in shown
    assert f"/{STEPS}" in shown, "steps of all"
    printed_by(run.kubectl, "report", run.name, "--on", "kubernetes", "--out", str(page))
    assert f"{run.name}-r-" in page.read_text(), "the fleet is in it"


def taken_home(run: Run, folder: Path) -> None:
    """`get` brings the trained model and what was measured."""
    printed_by(run.kubectl, "get", run.name, str(folder))
    assert list(folder.rglob("*.safetensors"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows if row["phase"] == "rl") == STEPS


def left_behind(bed: Cluster) -> set[str]:
    """Names of what the release has left."""
    inside = Kubectl(bed.kubeconfig, OPERATOR_NAMESPACE)("get", INSIDE, "-o", "name").split()
    everywhere = Kubectl(bed.kubeconfig)("get", EVERYWHERE, "-l", f"app.kubernetes.io/instance={RELEASE}", "-o", "name")
    return ({*inside} - NATIVE) | {*everywhere.split()}
