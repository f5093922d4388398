"""The operator is killed fifty times at random while a job runs, rollouts go and the job is scaled: in the end there is
what there would be without a single kill, and the job completes with nothing lost or doubled.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest
from cluster.port import Cluster
from cluster.tools import Kubectl
from on_cluster.audit import assert_nothing_lost, read_report
from on_cluster.faults import OPERATOR_PODS, Victims, kill_operator
from on_cluster.job import Run, short_job
from on_cluster.settings import OPERATOR_NAMESPACE

KILLS = 50
LONGEST_LIFE_S = 12.0
"""A new operator starts in a few seconds and waits up to 15 for the Lease of the one that was killed; so some die while
they wait, some while they catch up, some at work."""
STEPS = 500
"""More than fifty kills last."""
STEPS_S = 1800.0
OWNED = (
    "pods,jobs,services,configmaps,secrets,persistentvolumeclaims,poddisruptionbudgets,networkpolicies,serviceaccounts"
)
FLEETS = (1, 2, 3)
LAST_FLEET = 2
"""What is asked for at last, as at first."""
CHANGE = 0.5
"""Share of the kills that the world changes before."""


@pytest.mark.timeout(5400)
def test_fifty_kills_of_the_operator_change_nothing(
    whole_bed: Cluster, kubectl: Kubectl, operator: None, seed: int
) -> None:
    draw = random.Random(seed)
    job = short_job("kills", STEPS)
    job["spec"]["scaling"] = {"mode": "Manual"}
    job["spec"]["rollout"] |= {"minReplicas": 0, "maxReplicas": max(FLEETS), "replicas": LAST_FLEET}
    run = Run(kubectl, job)
    run.apply()
    run.await_step(1)
    run.await_whole()
    undisturbed = inventory(run)
    for number in range(KILLS):
        if draw.random() < CHANGE:
            change(run, draw)
        time.sleep(draw.uniform(0, LONGEST_LIFE_S))  # when it dies is what is drawn
        kill(whole_bed, kubectl, run)
        assert not run.twins(), f"after kill {number}: {run.twins()}"
    scale(run, LAST_FLEET)
    run.await_step(run.step() + 2)
    run.await_fleet(LAST_FLEET)
    assert inventory(run) == undisturbed
    run.await_complete(STEPS_S)
    report = read_report(kubectl, run.name)
    print(report["samples"])
    assert_nothing_lost(report)


def change(run: Run, draw: random.Random) -> None:
    """What only the operator can answer: another size, or a rollout that goes."""
    live = run.live("rollout")
    if live and draw.random() < CHANGE:
        run.kubectl("delete", "pod", draw.choice(live)["metadata"]["name"], "--wait=false")
    else:
        scale(run, draw.choice(FLEETS))


def scale(run: Run, replicas: int) -> None:
    run.kubectl("scale", f"prl/{run.name}", f"--replicas={replicas}")


def kill(bed: Cluster, kubectl: Kubectl, run: Run) -> None:
    """SIGKILL, and a new pod, for a container that dies again and again is started later and later."""
    kill_operator(Victims(bed, kubectl, run=run))
    Kubectl(bed.kubeconfig, OPERATOR_NAMESPACE)(
        "delete", "pods", "-l", OPERATOR_PODS, "--wait=false", "--grace-period=0", "--force"
    )


def inventory(run: Run) -> Counter[str]:
    """The job's objects, by name where the name is fixed and by number where it counts up."""
    found = run.kubectl.items(OWNED, "-l", f"polyrl.dev/job-name={run.name}")
    return Counter(
        f"{one['kind']}/{called(one)}"
        for one in found
        if "deletionTimestamp" not in one["metadata"] and one.get("status", {}).get("phase") != "Failed"
    )


def called(one: dict[str, Any]) -> str:
    """By role: pods, and what is a pod's, for a rollout's Secret has its name."""
    metadata = one["metadata"]
    of_pod = any(owner["kind"] == "Pod" for owner in metadata.get("ownerReferences", []))
    return str(metadata["labels"].get("polyrl.dev/role") if one["kind"] == "Pod" or of_pod else metadata["name"])
