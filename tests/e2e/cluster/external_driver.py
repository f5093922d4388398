"""Any other bed: an executable that knows the port's verbs, named by POLYRL_CLUSTER_DRIVER.

    DRIVER up | down | kubeconfig | load-image REFERENCE... | add-node NAME POOL | kill-node NAME | remove-node NAME
    DRIVER freeze NAME | thaw NAME | stop-api | start-api | restart-etcd | kill-process NODE POD_UID PATTERN

Exit 0: done; `kubeconfig` prints a path, `kill-process` how many it killed. Exit 3: this bed cannot do that. Anything
else: it failed, and stderr says why.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cluster.port import BedFailed, Unsupported

CANNOT: Final = 3
VERB_S: Final = 900.0
"""The longest verb brings up a cluster and all its images."""


class ExternalCluster:
    """The port over an executable."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self.kubeconfig = Path(self._do("kubeconfig").strip())

    def _do(self, verb: str, *args: str) -> str:
        try:
            done = subprocess.run(
                (self._driver, verb, *args), capture_output=True, text=True, timeout=VERB_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise BedFailed(f"{self._driver} {verb}: no end within {VERB_S:g} s") from None
        if done.returncode == CANNOT:
            raise Unsupported(f"{self._driver} cannot {verb}: {done.stderr.strip()}")
        if done.returncode:
            raise BedFailed(f"{self._driver} {verb}: exit {done.returncode}: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def up(self) -> None:
        self._do("up")

    def down(self) -> None:
        self._do("down")

    def load_image(self, references: Sequence[str]) -> None:
        self._do("load-image", *references)

    def add_node(self, name: str, pool: str) -> None:
        self._do("add-node", name, pool)

    def kill_node(self, name: str) -> None:
        self._do("kill-node", name)

    def remove_node(self, name: str) -> None:
        self._do("remove-node", name)

    def freeze(self, name: str) -> None:
        self._do("freeze", name)

    def thaw(self, name: str) -> None:
        self._do("thaw", name)

    def stop_api(self) -> None:
        self._do("stop-api")

    def start_api(self) -> None:
        self._do("start-api")

    def restart_etcd(self) -> None:
        self._do("restart-etcd")

    def kill_process(self, node: str, pod_uid: str, pattern: str) -> int:
        return int(self._do("kill-process", node, pod_uid, pattern))
