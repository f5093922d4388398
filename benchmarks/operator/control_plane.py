"""A control plane of processes for the benchmark: etcd, API server, scheduler, job controller, and kwok's fake nodes.

All from the folder KUBEBUILDER_ASSETS. Each is its own process, so that its CPU seconds are not the operator's.
There are no other controllers (nothing here needs Endpoints or garbage collection), no volumes (claims stay pending,
and the scheduler is configured not to mind) and no kubelets.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import psutil

ROOT: Final = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/integration"))
from conftest import BareApiServer  # noqa: E402

NEEDED: Final = ("etcd", "kube-apiserver", "kubectl", "kube-scheduler", "kube-controller-manager", "kwok")
NODES: Final = 40
PODS_PER_NODE: Final = 500
"""Beyond the usual 110: fewer nodes make the scheduler cheaper, and it is not what is measured."""
RATE: Final = 5000
"""Requests a second that scheduler and job controller allow themselves; their defaults, 50 and 20, are for clusters
whose pods take longer to start."""
BY_KWOK: Final = "kwok.x-k8s.io/node"
STAGES: Final = Path(__file__).with_name("stages.yaml")
VOLUMES: Final = ("VolumeBinding", "VolumeZone", "VolumeRestrictions", "NodeVolumeLimits")


class ControlPlane(BareApiServer):  # type: ignore[misc]  # tests are no package
    """Started like a bare API server; `add_nodes` then gives it nodes."""

    def add_nodes(self) -> None:
        """Fake nodes that run what is bound to them, and who binds it. Raises SystemExit when one is refused."""
        # A node is new with a taint that the node controller, which does not run, would take off.
        untainted = {"spec": {"taints": None}}
        for number in range(NODES):
            name = f"fake-{number}"
            made = self.request("POST", "/api/v1/nodes", _node(name))
            done = self.request("PATCH", f"/api/v1/nodes/{name}", untainted, content="application/merge-patch+json")
            if (made[0], done[0]) != (201, 200):
                raise SystemExit(f"no fake node: {made[1]} {done[1]}")
        access = f"--kubeconfig={self.kubeconfig()}"
        settings = self.folder / "scheduler.json"
        settings.write_text(json.dumps(_scheduler(self.kubeconfig())))
        self._spawn("kube-scheduler", f"--config={settings}", "--secure-port=0")
        self._spawn("kube-controller-manager", access, "--controllers=job-controller", "--leader-elect=false",
                    f"--kube-api-qps={RATE}", f"--kube-api-burst={RATE}", "--secure-port=0")  # fmt: skip
        self._spawn("kwok", access, f"--manage-nodes-with-annotation-selector={BY_KWOK}=fake", f"--config={STAGES}",
                    "--node-lease-duration-seconds=0", "--cidr=10.200.0.0/16")  # fmt: skip

    def cpu_seconds(self) -> dict[str, float]:
        """User and system seconds so far, by program."""
        used = {}
        for process in self.processes:
            if process.poll() is not None:
                raise SystemExit(f"{process.args} ended, see the logs in {self.folder}")
            seen = psutil.Process(process.pid)
            used[seen.name()] = sum(seen.cpu_times()[:2])
        return used


def _node(name: str) -> dict[str, Any]:
    room = {"cpu": "4k", "memory": "64Ti", "ephemeral-storage": "64Ti", "pods": str(PODS_PER_NODE)}
    ready = {"type": "Ready", "status": "True", "reason": "Fake", "message": "it runs whatever comes"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": {BY_KWOK: "fake"}},
        "status": {"capacity": room, "allocatable": room, "conditions": [ready]},
    }


def _scheduler(kubeconfig: Path) -> dict[str, Any]:
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(kubeconfig), "qps": RATE, "burst": RATE},
        "profiles": [{"plugins": {"multiPoint": {"disabled": [{"name": name} for name in VOLUMES]}}}],
    }
