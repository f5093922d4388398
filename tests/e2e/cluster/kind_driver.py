"""A cluster of kind, its machines containers: `docker kill` takes one away, `docker pause` hangs one.

kind has no verb for one more node, so only a node that died comes back.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cluster.port import POOL_LABEL, BedFailed, Unsupported
from cluster.tools import Kubectl, call, eventually

CONFIG: Final = Path(__file__).with_name("kind.yaml")
NODE_IMAGE: Final = "KIND_NODE_IMAGE"
"""Environment variable: the image of the nodes; default kind's own."""
UP_S: Final = 600.0
"""kind pulls its node image first, 400 MB."""
READY_S: Final = 180.0
LOAD_S: Final = 600.0
"""Two GB into one node, which unpacks them."""
UNPACKED_ONLY: Final = "--discard-unpacked-layers"
API_MANIFEST: Final = "kube-apiserver.yaml"


class KindCluster:
    """The port over `kind` and `docker`."""

    def __init__(self, name: str, kubeconfig: Path) -> None:
        self.name = name
        self.kubeconfig = kubeconfig
        self.kubectl = Kubectl(kubeconfig)
        self._control_plane = f"{name}-control-plane"

    def up(self) -> None:
        if self.name in call("kind", "get", "clusters", "-q").split():
            return
        self.kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        image = ("--image", os.environ[NODE_IMAGE]) if os.environ.get(NODE_IMAGE) else ()
        common = ("--name", self.name, "--kubeconfig", str(self.kubeconfig), "--config", str(CONFIG))
        call("kind", "create", "cluster", "-q", *common, *image, timeout_s=UP_S)
        deadline = f"--timeout={READY_S:g}s"
        self.kubectl("wait", "--for=condition=Ready", "nodes", "--all", deadline, timeout_s=READY_S)
        self.kubectl("-n", "kube-system", "rollout", "status", "deployment/coredns", deadline, timeout_s=READY_S)

    def down(self) -> None:
        call(
            "kind",
            "delete",
            "cluster",
            "-q",
            "--name",
            self.name,
            "--kubeconfig",
            str(self.kubeconfig),
            timeout_s=READY_S,
        )
        self.kubeconfig.unlink(missing_ok=True)

    def load_image(self, references: Sequence[str]) -> None:
        """As `kind load` does it, but what is unpacked is not kept packed as well: half the disk, and half the time."""
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "images.tar"
            call("docker", "save", "-o", str(archive), *references, timeout_s=LOAD_S)
            for node in self._workers():
                self._import(node, archive)

    def _import(self, node: str, archive: Path) -> None:
        ctr = (
            "ctr",
            "--namespace=k8s.io",
            "images",
            "import",
            "--local",
            "--snapshotter=overlayfs",
            UNPACKED_ONLY,
            "-",
        )
        with archive.open("rb") as packed:
            argv = ("docker", "exec", "--privileged", "-i", node, *ctr)
            done = subprocess.run(argv, stdin=packed, capture_output=True, text=True, timeout=LOAD_S, check=False)
        if done.returncode:
            raise BedFailed(f"no images into {node}: {done.stderr.strip()[-1000:]}")

    def _workers(self) -> list[str]:
        return [n["metadata"]["name"] for n in self.kubectl.items("nodes", "-l", POOL_LABEL)]

    def add_node(self, name: str, pool: str) -> None:
        if name not in call("docker", "ps", "-a", "--format", "{{.Names}}").split():
            raise Unsupported(f"kind adds no nodes to a cluster: there never was a {name}")
        call("docker", "start", name)
        eventually(f"node {name} is Ready", lambda: self.kubectl.node_ready(name) == "True", READY_S)

    def kill_node(self, name: str) -> None:
        call("docker", "kill", name)

    def remove_node(self, name: str) -> None:
        self.kubectl("delete", "node", name)

    def freeze(self, name: str) -> None:
        call("docker", "pause", name)

    def thaw(self, name: str) -> None:
        call("docker", "unpause", name)

    def stop_api(self) -> None:
        """Out of the folder of the kubelet's static pods, and so ended."""
        self._on(self._control_plane, f"mv /etc/kubernetes/manifests/{API_MANIFEST} /etc/kubernetes/")
        eventually("the API server is away", lambda: not self.kubectl.answers(), READY_S)

    def start_api(self) -> None:
        self._on(self._control_plane, f"mv /etc/kubernetes/{API_MANIFEST} /etc/kubernetes/manifests/")
        eventually("the API server answers", self.kubectl.answers, READY_S)

    def restart_etcd(self) -> None:
        self._on(self._control_plane, "kill -9 $(pidof etcd)")
        eventually("the API server answers", self.kubectl.answers, READY_S)

    def kill_process(self, node: str, pod_uid: str, pattern: str) -> int:
        # Systemd names a pod's cgroup with underscores, the cgroupfs driver with dashes.
        script = (
            'n=0; for p in /proc/[0-9]*; do if tr _ - <$p/cgroup | grep -q "$1" && tr "\\0" " " <$p/cmdline '
            '| grep -q -- "$2"; then kill -9 ${p#/proc/} && n=$((n+1)); fi; done 2>/dev/null; echo $n'
        )
        return int(call("docker", "exec", node, "sh", "-c", script, "sh", pod_uid, pattern))

    def _on(self, node: str, script: str) -> str:
        return call("docker", "exec", node, "sh", "-c", script)
