"""Spot by the real Karpenter: machines come when rollouts wait, go when they are not needed, and are emptied by drain.

One job lives through a spot market that closes and opens again, and another through a consolidation. Times are printed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from cluster.port import Cluster
from cluster.tools import Kubectl, eventually
from karpenter import node_pools
from karpenter.bed import DRIVER, TYPES, drive, environment_driver, interrupt, machines_in, ordered_nodes
from karpenter.node_pools import GPU, ON_DEMAND, SPOT
from on_cluster import release
from on_cluster.audit import read_report
from on_cluster.job import Run, is_ready, short_job
from on_cluster.settings import OPERATOR_NAMESPACE

NODE_S = 420.0
"""A machine comes, takes its images, starts a pod whose engine joins: a minute on idle cores."""
EMPTY_S = 180.0
"""Karpenter looks for empty nodes every 20 s or so."""
ROLLOUTS = 2
STEPS = 100_000
"""More than any test waits for: the jobs are ended by us."""

pytestmark = pytest.mark.timeout(3000)


@pytest.fixture(scope="module")
def karpenter(bed: Cluster) -> Iterator[Kubectl]:
    """Karpenter runs with the NodePools of our pages, and the operator has seen that it is there."""
    driver = environment_driver()
    if not driver:
        pytest.skip(f"{DRIVER} names no executable that runs Karpenter with real machines")
    everywhere = Kubectl(bed.kubeconfig)
    drive(driver, "up", str(TYPES))
    node_pools.apply(everywhere)
    release.install(bed.kubeconfig)
    operator = Kubectl(bed.kubeconfig, OPERATOR_NAMESPACE)
    operator("rollout", "restart", "deployment/polyrl-operator")
    operator("rollout", "status", "deployment/polyrl-operator", "--timeout=120s", timeout_s=125)
    yield everywhere
    node_pools.delete(everywhere)
    drive(driver, "down")


def job(name: str, **capacity: Any) -> dict[str, Any]:
    """A job whose pods want a GPU each, by the preset of our pages; its size is ours to set."""
    made = short_job(name, steps=STEPS)
    wants = {"resources": {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {GPU: "1"}}}
    spec = made["spec"]
    spec["scaling"] = {"mode": "Manual"}
    spec["rollout"] |= {
        "replicas": ROLLOUTS,
        "minReplicas": 0,
        "maxReplicas": ROLLOUTS,
        "capacity": {"preset": "Karpenter", **capacity},
        "template": {"spec": {"containers": [{"name": "rollout", **wants}]}},
    }
    spec["trainer"]["template"] = {"spec": {"containers": [{"name": "trainer", **wants}]}}
    return made


def serving(run: Run, pool: str) -> list[str]:
    """The node of each ready rollout of one pool."""
    ready = [pod for pod in run.pods("rollout") if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]]
    return [pod["spec"]["nodeName"] for pod in ready if pod["metadata"]["labels"]["polyrl.dev/pool"] == pool]


def count(run: Run, what: str) -> int:
    return int(run.status().get("rollout", {}).get(what, 0))


def generates(run: Run, timeout_s: float = NODE_S) -> None:
    """Two more steps are done with the whole fleet."""
    eventually("all rollouts are at work", lambda: count(run, "registeredReplicas") == ROLLOUTS, timeout_s, poll_s=1)
    step = run.step()
    eventually("steps advance", lambda: run.step() >= step + 2, timeout_s, poll_s=1)


class Clock:
    """Seconds since the last mark, printed."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def mark(self, what: str) -> None:
        now = time.monotonic()
        print(f"{what}: {now - self.began:.1f} s")
        self.began = now


def trainers_node(run: Run) -> str:
    (pod,) = run.live("trainer")
    name: str = pod["spec"]["nodeName"]
    return name


def test_a_spot_market_that_closes_and_opens_again(karpenter: Kubectl, kubectl: Kubectl) -> None:
    run = Run(kubectl, job("market", policy="SpotPreferred", fallback={"enabled": True, "afterSeconds": 60}))
    clock = Clock()
    run.apply()
    generates(run)
    clock.mark("from nothing to rollouts at work on spot machines that Karpenter ordered")
    home = trainers_node(run)
    assert set(serving(run, "spot")) == set(ordered_nodes(karpenter, SPOT)) <= machines_in(karpenter, "spot")
    assert home in ordered_nodes(karpenter, ON_DEMAND)

    node_pools.limit_spot(karpenter, 0)
    interrupt(karpenter, SPOT)
    eventually("both are counted as taken away", lambda: count(run, "preemptions") >= ROLLOUTS, NODE_S, poll_s=1)
    clock.mark("from the notice to both counted")
    eventually("stand-ins serve", lambda: len(serving(run, "on-demand")) == ROLLOUTS, NODE_S, poll_s=1)
    clock.mark("from there to on-demand stand-ins at work")
    generates(run)
    assert trainers_node(run) == home
    assert not ordered_nodes(karpenter, SPOT)

    node_pools.limit_spot(karpenter, 64)
    eventually("spot serves again", lambda: len(serving(run, "spot")) == ROLLOUTS, 2 * NODE_S, poll_s=1)
    clock.mark("from spot's return to spot rollouts at work")
    eventually("stand-ins have left", lambda: not serving(run, "on-demand"), NODE_S, poll_s=1)
    only_home = lambda: set(ordered_nodes(karpenter, ON_DEMAND)) == {home}  # noqa: E731 - a probe
    eventually("their machines are gone, the trainer's stays", only_home, EMPTY_S, poll_s=1)
    clock.mark("from there to their machines gone")

    kubectl("scale", f"prl/{run.name}", "--replicas=0")
    eventually("no spot machine is left", lambda: not ordered_nodes(karpenter, SPOT), EMPTY_S + NODE_S, poll_s=1)
    clock.mark("from replicas 0 to no spot machine")
    assert trainers_node(run) == home
    assert not run.twins()
    finish(run)


def test_a_consolidation_empties_nodes_by_drain_and_spares_the_trainers(karpenter: Kubectl, kubectl: Kubectl) -> None:
    manifest = job("consolidated", policy="OnDemand")
    manifest["spec"]["rollout"]["replicas"] = 0
    run = Run(kubectl, manifest)
    run.apply()
    # One after the other, or Karpenter would order one larger machine for all at once.
    eventually("the trainer is ready", lambda: run.live("trainer"), NODE_S, poll_s=1)
    for number in range(1, ROLLOUTS + 1):
        kubectl("scale", f"prl/{run.name}", f"--replicas={number}")
        eventually("rollouts serve", lambda wanted=number: len(serving(run, "on-demand")) == wanted, NODE_S, poll_s=1)
    generates(run)
    home = trainers_node(run)
    before = set(serving(run, "on-demand"))
    assert len(before) == ROLLOUTS, "each on a machine of its own: together they cost more than one for two"

    clock = Clock()
    node_pools.apply(karpenter, policy="WhenEmptyOrUnderutilized")

    def moved() -> bool:
        nodes = serving(run, "on-demand")
        return len(nodes) == ROLLOUTS and len(set(nodes)) == 1 and not before & set(ordered_nodes(karpenter, ON_DEMAND))

    eventually("both work on one machine, and theirs are gone", moved, 2 * NODE_S, poll_s=1)
    clock.mark("from the decision to consolidate to both rollouts on one cheaper machine")
    generates(run)
    assert trainers_node(run) == home, "do-not-disrupt"
    recorded = {
        event["reason"] for event in kubectl.items("events", "--field-selector", f"involvedObject.name={run.name}")
    }
    assert "RolloutPreempted" in recorded
    node_pools.apply(karpenter)
    finish(run)


def finish(run: Run) -> None:
    """The job is ended as a user would, and its journal shows that nothing was lost or doubled."""
    run.kubectl("patch", "prl", run.name, "--type=merge", "-p", json.dumps({"spec": {"suspend": True}}))
    gone = lambda: not [pod for role in ("rollout", "manager", "trainer") for pod in run.pods(role)]  # noqa: E731
    eventually("everything of it has ended", gone, NODE_S, poll_s=1)
    report = read_report(run.kubectl, run.name)
    print(json.dumps({"job": run.name, **report["samples"]}))
    broken = [verdict for verdict in report["verdicts"] if verdict["broken"]]
    assert not broken, broken
    assert not report["samples"]["twice"]
    run.delete()
