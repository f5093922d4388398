"""The faults that clusters inject, as a table: what is done, to which pods, and how the world is put right again.

Each does one thing and returns when, and whom it hit; that nothing was lost is checked in the journal afterwards.
None waits for PolyRL: a fault knows nothing of how it is mended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from cluster.port import BedFailed, Cluster
from cluster.tools import Kubectl, call
from on_cluster.job import Run
from on_cluster.settings import OPERATOR_NAMESPACE

FROZEN_S: Final = 60.0
AWAY_S: Final = 60.0
OPERATOR_PODS: Final = "app.kubernetes.io/component=operator"
GOING: Final = "e2e.polyrl.dev/going"
"""Key of the taint that stands for a termination handler's."""
SIGKILLED: Final = 137
"""128 + SIGKILL, as shells report it."""
HOG: Final = """
import os
with open("/dev/shm/hog", "wb") as hog:
    while True:
        hog.write(bytes(1 << 24))
"""
"""Memory that belongs to the container and to no process in it: the kernel ends the largest one, the engine."""


@dataclass(frozen=True)
class Hit:
    """What a fault did."""

    at: float
    """Unix seconds when the first sign of it could be seen."""
    engines: tuple[str, ...] = ()
    """Rollouts that it took away, or may have."""
    notice: bool = False
    """Whether they were notified beforehand."""


@dataclass(frozen=True)
class Victims:
    """Whom a fault may hit."""

    bed: Cluster
    kubectl: Kubectl
    run: Run

    def rollout(self) -> dict[str, Any]:
        """The oldest rollout that serves."""
        return self.run.live("rollout")[0]

    def name(self) -> str:
        name: str = self.rollout()["metadata"]["name"]
        return name

    def node(self) -> tuple[str, tuple[str, ...]]:
        """The machine of the oldest rollout, and all rollouts on it."""
        node: str = self.rollout()["spec"]["nodeName"]
        return node, tuple(p["metadata"]["name"] for p in self.run.live("rollout") if p["spec"]["nodeName"] == node)

    def kill(self, pod: dict[str, Any], pattern: str) -> Hit:
        """SIGKILL for the pod's processes with `pattern` on their command line; there must be one."""
        at = time.time()
        killed = self.bed.kill_process(pod["spec"]["nodeName"], pod["metadata"]["uid"], pattern)
        assert killed, f"nothing ran that has {pattern!r} on its command line"
        return Hit(at, (pod["metadata"]["name"],) if pod["metadata"]["labels"]["polyrl.dev/role"] == "rollout" else ())


def delete_gracefully(on: Victims) -> Hit:
    return _delete(on, notice=True)


def delete_at_once(on: Victims) -> Hit:
    return _delete(on, "--grace-period=0", "--force", notice=False)


def _delete(on: Victims, *how: str, notice: bool) -> Hit:
    hit = Hit(time.time(), (on.name(),), notice=notice)
    on.kubectl("delete", "pod", *hit.engines, "--wait=false", *how)
    return hit


def evict(on: Victims) -> Hit:
    """The eviction API, as autoscalers and `kubectl drain` use it."""
    hit = Hit(time.time(), (on.name(),), notice=True)
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": hit.engines[0]}}
    path = f"/api/v1/namespaces/{on.kubectl.namespace}/pods/{hit.engines[0]}/eviction"
    on.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))
    return hit


def taint(on: Victims) -> Hit:
    """NoExecute, as a cloud's termination handler writes it before the machine goes."""
    node, engines = on.node()
    hit = Hit(time.time(), engines, notice=True)
    on.kubectl("taint", "node", node, f"{GOING}=true:NoExecute", "--overwrite")
    return hit


def drain(on: Victims) -> Hit:
    node, engines = on.node()
    hit = Hit(time.time(), engines, notice=True)
    on.kubectl("drain", node, "--force", "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=60s", timeout_s=70)
    return hit


def kill_node(on: Victims) -> Hit:
    """Never to come back while the job runs."""
    node, engines = on.node()
    hit = Hit(time.time(), engines)
    on.bed.kill_node(node)
    return hit


def freeze_node(on: Victims) -> Hit:
    node, engines = on.node()
    hit = Hit(time.time(), engines)
    on.bed.freeze(node)
    time.sleep(FROZEN_S)  # the length of the hang is the fault
    on.bed.thaw(node)
    return hit


def out_of_memory(on: Victims) -> Hit:
    """The kernel kills in the container, because more memory is asked for than its limit allows."""
    name = on.name()
    hit = Hit(time.time(), (name,))
    argv = ("kubectl", "-n", on.kubectl.namespace, "exec", name, "--", "sh", "-c", 'python -c "$0" || true', HOG)
    try:
        call(*argv, kubeconfig=on.kubectl.kubeconfig)
    except BedFailed as ended:
        # Where memory.oom.group is set, the kernel ends all of the container, this shell with it.
        if f"exit code {SIGKILLED}" not in str(ended):
            raise
    return hit


def kill_agent(on: Victims) -> Hit:
    return on.kill(on.rollout(), "polyrl_rollout.agent")


def kill_engine(on: Victims) -> Hit:
    return on.kill(on.rollout(), "engines.embedded.process")


def kill_manager(on: Victims) -> Hit:
    return on.kill(on.run.live("manager")[0], "polyrl_rollout.manager")


def delete_manager(on: Victims) -> Hit:
    hit = Hit(time.time())
    on.kubectl(
        "delete", "pod", on.run.live("manager")[0]["metadata"]["name"], "--wait=false", "--grace-period=0", "--force"
    )
    return hit


def kill_trainer(on: Victims) -> Hit:
    return on.kill(on.run.live("trainer")[0], "polyrl_trainer")


def evict_trainer(on: Victims) -> Hit:
    """A disruption: deleted as by a cluster, not by its own fault."""
    hit = Hit(time.time())
    on.kubectl("delete", "pod", on.run.live("trainer")[0]["metadata"]["name"], "--wait=false")
    return hit


def kill_operator(on: Victims) -> Hit:
    pods = Kubectl(on.kubectl.kubeconfig, OPERATOR_NAMESPACE)
    hit = Hit(time.time())
    for pod in pods.items("pods", "-l", OPERATOR_PODS):
        on.bed.kill_process(pod["spec"]["nodeName"], pod["metadata"]["uid"], "polyrl_operator")
    return hit


def api_away(on: Victims) -> Hit:
    """Nobody reaches the API server for a minute; a rollout dies meanwhile, which nobody can report."""
    victim = on.rollout()
    on.bed.stop_api()
    try:
        hit = on.kill(victim, "polyrl_rollout.agent")
        time.sleep(AWAY_S)  # the length of the outage is the fault
    finally:
        on.bed.start_api()
    return hit


def etcd_restarted(on: Victims) -> Hit:
    hit = Hit(time.time())
    on.bed.restart_etcd()
    return hit


Fault = Callable[[Victims], Hit]
FAULTS: Final[dict[str, Fault]] = {
    one.__name__: one
    for one in (
        delete_gracefully,
        delete_at_once,
        evict,
        taint,
        drain,
        kill_node,
        freeze_node,
        out_of_memory,
        kill_agent,
        kill_engine,
        kill_manager,
        delete_manager,
        kill_trainer,
        evict_trainer,
        kill_operator,
        api_away,
        etcd_restarted,
    )
}


def mend(bed: Cluster, node: str, pool: str) -> None:
    """A node as it was: there, Ready, schedulable, without our taint."""
    kubectl = Kubectl(bed.kubeconfig)
    if kubectl.node_ready(node) != "True":
        bed.add_node(node, pool)
    kubectl("uncordon", node)
    if any(taint["key"] == GOING for taint in kubectl.json("node", node)["spec"].get("taints", [])):
        kubectl("taint", "node", node, f"{GOING}-")
