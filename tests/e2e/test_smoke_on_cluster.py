"""The whole way once, small: install, train, lose a machine, complete, uninstall, and nothing is left but the CRD."""

from __future__ import annotations

import pytest
from cluster.port import Cluster
from cluster.tools import Kubectl, eventually
from on_cluster import release
from on_cluster.audit import assert_nothing_lost, read_report
from on_cluster.faults import Victims, kill_node
from on_cluster.job import Run, short_job
from on_cluster.settings import OPERATOR_NAMESPACE, RELEASE

STEPS = 30
STEP = 5
GONE_S = 60.0
"""Helm returns while the operator's pod still ends."""
INSIDE = "pods,services,deployments,configmaps,secrets,serviceaccounts,roles,rolebindings,leases"
EVERYWHERE = "clusterroles,clusterrolebindings,priorityclasses"
NATIVE = {"configmap/kube-root-ca.crt", "serviceaccount/default"}
"""What every namespace has."""


@pytest.mark.timeout(1200)
def test_install_train_lose_a_machine_complete_uninstall(whole_bed: Cluster, kubectl: Kubectl) -> None:
    release.install(whole_bed.kubeconfig)
    run = Run(kubectl, short_job("smoke", STEPS))
    run.apply()
    run.await_step(STEP)
    kill_node(Victims(whole_bed, kubectl, run=run))
    run.await_complete()
    print(kubectl("get", "prl"))
    assert_nothing_lost(read_report(kubectl, run.name))
    run.delete()
    release.uninstall(whole_bed.kubeconfig)
    eventually("nothing of the release is left", lambda: not left_behind(whole_bed), GONE_S)
    assert Kubectl(whole_bed.kubeconfig)("get", "crd", "polyrljobs.polyrl.dev", "-o", "name").strip()


def left_behind(bed: Cluster) -> set[str]:
    """Names of what the release has left."""
    inside = Kubectl(bed.kubeconfig, OPERATOR_NAMESPACE)("get", INSIDE, "-o", "name").split()
    everywhere = Kubectl(bed.kubeconfig)("get", EVERYWHERE, "-l", f"app.kubernetes.io/instance={RELEASE}", "-o", "name")
    return ({*inside} - NATIVE) | {*everywhere.split()}
