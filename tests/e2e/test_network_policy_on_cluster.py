"""Traffic through the NetworkPolicies of a job and of the operator, where the cluster enforces them.

Pods stand for each role of a job, for the operator, and for strangers; each tries every port of all others, before the
policies and under them. A cluster that enforces none is seen by that, and the test is skipped with that sentence.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations, product
from typing import Any

import pytest
from cluster.port import Cluster, Unsupported
from cluster.tools import Kubectl, call, eventually
from on_cluster.job import short_job
from on_cluster.settings import ROOT, image

from polyrl.cluster import names
from polyrl.cluster.resources.network import network_policies
from polyrl.cluster.resources.owner import Owner, Settings
from polyrl.manifest.job import PolyRLJob
from polyrl.worker import Role

HTTP, METRICS, HEALTH = 5000, 8080, 8081
"""Of a manager by default, and of the chart's operator."""
PORTS = (HTTP, names.AGENTS_PORT, names.TRAINER_PORT, names.PUBLISHER_PORT, METRICS, HEALTH)
METADATA = ("169.254.169.254", 80)
OPEN = {
    ("operator", "manager", HTTP),
    ("trainer", "manager", names.AGENTS_PORT),
    ("trainer", "manager", names.TRAINER_PORT),
    ("rollout", "manager", names.AGENTS_PORT),
    ("rollout", "trainer", names.PUBLISHER_PORT),
}
"""All that is left between those that have policies: who asks, whom, and which port."""
GUARDED = {"manager", "trainer", "rollout", "operator"}
READY_S = 120.0
ENFORCED_S = 20.0
"""Until a policy is at work: engines follow them within seconds."""
SETTLED_S = 60.0
"""Until all of them are."""
LISTEN = """
import socketserver, sys, threading
for port in map(int, sys.argv[1:]):
    server = socketserver.ThreadingTCPServer(("", port), socketserver.BaseRequestHandler)
    threading.Thread(target=server.serve_forever).start()
"""
CONNECT = """
import concurrent.futures, json, socket, sys
def reached(place):
    try:
        socket.create_connection(place, timeout=3).close()
        return True
    except OSError:
        return False
places = [tuple(place) for place in json.loads(sys.argv[1])]
with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
    print(json.dumps([place for place, yes in zip(places, pool.map(reached, places)) if yes]))
"""
ROLES = (Role.MANAGER, Role.TRAINER, Role.ROLLOUT)
Flow = tuple[str, str, int]


class Network:
    """Pods by what they stand for, each in its namespace: the job's, the operator's, and one of neither."""

    def __init__(self, kubectl: Kubectl) -> None:
        job = PolyRLJob.model_validate(short_job("job"))
        self.job, self.theirs, self.home = kubectl, *(self._beside(kubectl, end) for end in ("strangers", "operator"))
        settings = Settings("m", "t", rollout_image="r", operator_namespace=self.home.namespace)
        self.owner = Owner("job", kubectl.namespace, "uid", job, settings)
        operator = names.OPERATOR_LABELS | {f"{names.APP}/instance": "polyrl"}
        self.pods = {role.value: (kubectl, self.owner.selector(role)) for role in ROLES}
        self.pods |= {"operator": (self.home, operator), "impostor": (self.theirs, operator)}
        self.pods |= {"stranger": (self.theirs, {"app": "any"}), "neighbour": (kubectl, {"app": "any"})}
        self.addresses: dict[str, str] = {}

    @staticmethod
    def _beside(kubectl: Kubectl, end: str) -> Kubectl:
        return Kubectl(kubectl.kubeconfig, f"{kubectl.namespace}-{end}")

    def start(self) -> None:
        for place in (self.theirs, self.home):
            place("create", "namespace", place.namespace)
        for name, (place, labels) in self.pods.items():
            place("apply", "-f", "-", stdin=json.dumps(_pod(name, labels)))
        for name, (place, _) in self.pods.items():
            place("wait", f"pod/{name}", "--for=condition=Ready", f"--timeout={READY_S:g}s", timeout_s=READY_S)
            self.addresses[name] = place.json("pod", name)["status"]["podIP"]

    def isolate(self) -> None:
        """As the operator does it for its job, and the chart for the operator."""
        for policy in network_policies(self.owner):
            # No job of this uid is there: the garbage collector would take them.
            policy["metadata"].pop("ownerReferences")
            self.job("apply", "-f", "-", stdin=json.dumps(policy))
        given = ("--set=images.prefix=r/", '--set-json=networkPolicy.metricsFrom=[{"podSelector":{}}]')
        shown = ("-n", self.home.namespace, "--show-only", "templates/networkpolicy.yaml")
        rendered = call("helm", "template", "polyrl", str(ROOT / "charts/polyrl"), *given, *shown)
        self.home("apply", "-f", "-", stdin=rendered)

    def flows(self) -> set[Flow]:
        """All that get through at this moment, and `metadata` as the target of those that reach a metadata service."""
        with ThreadPoolExecutor(len(self.pods)) as pool:
            return set().union(*pool.map(self._from, self.pods))

    def _from(self, name: str) -> set[Flow]:
        by_address = {address: other for other, address in self.addresses.items() if other != name}
        targets = [*product(by_address, PORTS), METADATA]
        answer = self.pods[name][0]("exec", name, "--", "python", "-c", CONNECT, json.dumps(targets))
        return {(name, by_address.get(host, "metadata"), port) for host, port in json.loads(answer)}

    def stop(self) -> None:
        for place in (self.theirs, self.home):
            place("delete", "namespace", place.namespace, "--ignore-not-found", "--wait=false")


def _pod(name: str, labels: dict[str, str]) -> dict[str, Any]:
    """Restricted in the sense of Pod Security; ends at once when it is deleted."""
    listens = {
        "name": "main",
        "image": image("operator"),
        "command": ["python", "-c", LISTEN, *map(str, PORTS)],
        "readinessProbe": {"tcpSocket": {"port": PORTS[-1]}, "periodSeconds": 1},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    security = {"runAsNonRoot": True, "runAsUser": names.USER_ID, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"containers": [listens], "securityContext": security, "terminationGracePeriodSeconds": 0}
    spec |= {"automountServiceAccountToken": False, "restartPolicy": "Never"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def between_all(pods: Iterable[str]) -> set[Flow]:
    return {(one, other, port) for one, other in permutations(pods, 2) for port in PORTS}


def wrong(flows: set[Flow]) -> set[str]:
    """What a guarded pod gives or takes that it must not, and what is closed that a job needs."""
    guarded = {flow for flow in flows if GUARDED & set(flow[:2])}
    return {f"{flow} is open" for flow in guarded - OPEN} | {f"{flow} is closed" for flow in OPEN - guarded}


@pytest.fixture
def network(bed: Cluster, kubectl: Kubectl) -> Iterator[Network]:
    made = Network(kubectl)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def test_strangers_find_everything_closed_and_a_job_reaches_itself(network: Network) -> None:
    everything = between_all(network.pods)
    eventually("all listen", lambda: everything <= network.flows(), READY_S)
    network.isolate()
    until = time.monotonic() + ENFORCED_S
    while everything <= network.flows():
        if time.monotonic() > until:
            raise Unsupported("this cluster enforces no NetworkPolicies: all flows that they close are open")
    until = time.monotonic() + SETTLED_S
    while (left := wrong(network.flows())) and time.monotonic() < until:
        pass
    assert left == set()
