"""A cluster that somebody gave us by KUBECONFIG: we are guests, and touch nothing but our own namespaces.

Refuses every verb that belongs to the machines' owner; the tests that need one are skipped, and say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cluster.port import Unsupported


class GivenCluster:
    """The port over a kubeconfig alone."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig

    def up(self) -> None:
        """It is up."""

    def down(self) -> None:
        """It stays."""

    def load_image(self, references: Sequence[str]) -> NoReturn:
        self._not_ours(f"have images brought in: push {', '.join(references)} to its registry")

    def add_node(self, name: str, pool: str) -> NoReturn:
        self._not_ours(f"get node {name}")

    def kill_node(self, name: str) -> NoReturn:
        self._not_ours(f"lose node {name}")

    def remove_node(self, name: str) -> NoReturn:
        self._not_ours(f"lose Node {name}")

    def freeze(self, name: str) -> NoReturn:
        self._not_ours(f"have node {name} frozen")

    def thaw(self, name: str) -> NoReturn:
        self._not_ours(f"have node {name} thawed")

    def stop_api(self) -> NoReturn:
        self._not_ours("lose its API server")

    def start_api(self) -> NoReturn:
        self._not_ours("lose its API server")

    def restart_etcd(self) -> NoReturn:
        self._not_ours("have its etcd restarted")

    def kill_process(self, node: str, pod_uid: str, pattern: str) -> NoReturn:
        self._not_ours(f"have processes killed on {node}")

    def _not_ours(self, what: str) -> NoReturn:
        raise Unsupported(f"the cluster of KUBECONFIG={self.kubeconfig} is not ours, and will not {what}")
