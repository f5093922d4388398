"""A trainer of two pods of two processes each, on a cluster: it goes on after the loss of either pod, and ends well.

Both are on one machine, whose pods share any claim; one that several machines have is the user's to bring."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cluster.tools import Kubectl, eventually
from on_cluster.audit import assert_nothing_lost, read_report
from on_cluster.job import COMPLETE_S, RUNNING_S, Run, short_job

STEPS = 16
FIRST_LOSS, SECOND_LOSS = 3, 8


CLAIM = "shared"


def job_of_two_pods() -> dict[str, Any]:
    job = short_job("pods", STEPS)
    ours = {"labelSelector": {"matchLabels": {"polyrl.dev/job-name": "pods", "polyrl.dev/role": "trainer"}}}
    together = [{**ours, "topologyKey": "kubernetes.io/hostname"}]
    job["spec"]["trainer"] = {
        "replicas": 2,
        "processesPerPod": 2,
        "storage": {"claimName": CLAIM, "accessMode": "ReadWriteMany"},
        "template": {
            "spec": {
                "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": together}},
                "containers": [{"name": "trainer", "resources": {"requests": {"cpu": "200m", "memory": "1Gi"}}}],
            }
        },
    }
    job["spec"]["rollout"] |= {"minReplicas": 0, "maxReplicas": 0, "replicas": 0}
    recipe = job["spec"]["recipe"] | {"mode": "rl", "checkpoint": {"everySteps": 2}}
    # Steps of one stage only grow, so that a loss is sure to come after what it is to come after.
    del recipe["sft"], recipe["data"]["sft"]
    job["spec"]["recipe"] = recipe
    return job


@pytest.mark.timeout(2 * COMPLETE_S + 2 * RUNNING_S)
def test_the_loss_of_either_pod_costs_a_start_of_both(kubectl: Kubectl, operator: None) -> None:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM}, "spec": spec}
    kubectl("apply", "-f", "-", stdin=json.dumps(claim))
    run = Run(kubectl, job_of_two_pods())
    run.apply()
    for index, step in ((1, FIRST_LOSS), (0, SECOND_LOSS)):
        run.await_step(step)
        before = {pod["metadata"]["uid"] for pod in run.live("trainer")}
        assert len(before) == 2
        (lost,) = [pod for pod in run.live("trainer") if index_of(pod) == str(index)]
        kubectl("delete", "pod", lost["metadata"]["name"], "--grace-period=0", "--force", "--wait=false")
        eventually("both pods are others", lambda before=before: len(others(run, before)) == 2, RUNNING_S, poll_s=1)
    run.await_complete(2 * COMPLETE_S)
    print(kubectl("get", "pods"), run.status()["trainer"])
    assert run.status()["trainer"]["restarts"] <= 2, "each loss counted once"
    report = read_report(kubectl, run.name, CLAIM)
    assert_nothing_lost(report)


def index_of(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])


def others(run: Run, before: set[str]) -> list[dict[str, Any]]:
    return [pod for pod in run.live("trainer") if pod["metadata"]["uid"] not in before]
