"""One job whose fleet others decide on: a real HorizontalPodAutoscaler, a changed template, a suspension.

The autoscaler has no metrics here; that it keeps its bounds through the `scale` subresource needs none.
"""

from __future__ import annotations

import json

import pytest
from cluster.port import Cluster
from cluster.tools import Kubectl, eventually
from on_cluster.audit import assert_nothing_lost, read_report
from on_cluster.job import Run, short_job

STEPS = 300
"""More than the changes last."""
FLEET = 2
LARGER = 3
CHANGED_S = 300.0
"""A rollout makes way between two steps, and the next one starts in half a minute on crowded cores."""
MARK = {"e2e.polyrl.dev/template": "second"}

pytestmark = pytest.mark.timeout(1800)


def test_hpa_rolling_update_suspend_and_resume(whole_bed: Cluster, kubectl: Kubectl, operator: None) -> None:
    job = short_job("scaled", STEPS)
    job["spec"]["scaling"] = {"mode": "External"}
    job["spec"]["rollout"] |= {"minReplicas": 0, "maxReplicas": LARGER, "replicas": 1}
    run = Run(kubectl, job)
    run.apply()
    run.await_step(1)
    autoscale(run, FLEET)
    run.await_fleet(FLEET)
    autoscale(run, LARGER)
    run.await_fleet(LARGER)
    kubectl("delete", "hpa", run.name)
    roll_out(run)
    suspend_and_resume(run)
    run.await_complete()
    report = read_report(kubectl, run.name)
    print(report["samples"])
    assert_nothing_lost(report)


def autoscale(run: Run, least: int) -> None:
    """An autoscaler that wants at least so many."""
    target = {"apiVersion": "polyrl.dev/v1alpha1", "kind": "PolyRLJob", "name": run.name}
    hpa = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": run.name},
        "spec": {"scaleTargetRef": target, "minReplicas": least, "maxReplicas": LARGER},
    }
    run.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(hpa))


def roll_out(run: Run) -> None:
    """A changed template reaches all rollouts, one after another."""
    least = LARGER

    def replaced() -> bool:
        nonlocal least
        live = run.live("rollout")
        least = min(least, len(live))
        return len(live) == LARGER and all(MARK.items() <= pod["metadata"]["labels"].items() for pod in live)

    template = {"metadata": {"labels": MARK}, "spec": {"containers": [{"name": "rollout"}]}}
    change = json.dumps({"spec": {"rollout": {"template": template}}})
    run.kubectl("patch", "prl", run.name, "--type=merge", "-p", change)
    eventually("all rollouts are of the new template", replaced, CHANGED_S)
    assert least >= LARGER - 1, f"{least} rollouts were left, though maxUnavailable is 1"


def suspend_and_resume(run: Run) -> None:
    """Nothing of it runs, and it goes on from where it was."""
    before = run.step()
    suspend(run, True)
    run.kubectl("wait", f"prl/{run.name}", "--for=condition=Suspended", "--timeout=120s", timeout_s=125)
    eventually("no pod of the job runs", lambda: not (run.live("rollout") or run.live("trainer")), CHANGED_S)
    suspend(run, False)
    run.await_step(before + 1)
    run.await_fleet(LARGER)


def suspend(run: Run, yes: bool) -> None:
    run.kubectl("patch", "prl", run.name, "--type=merge", "-p", json.dumps({"spec": {"suspend": yes}}))
