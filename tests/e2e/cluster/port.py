"""What a test may do to a cluster: one port, whatever stands behind it.

A driver does what only the machines' owner can: nodes that die, freeze and come, the control plane away, images brought
in. What every user can do goes through `kubectl` and `helm` (see `tools`), the same on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

POOL_LABEL: Final = "polyrl.dev/pool"
"""On every worker node: `reserved` or `spot`; each driver sets it."""


class Unsupported(Exception):
    """This cluster does not let us do that; the test is skipped, and says so."""


class BedFailed(Exception):
    """A verb did not work: the bed is broken, not the code under test."""


class Cluster(Protocol):
    """One cluster. Every verb returns once done, raises Unsupported where it may not and BedFailed where it fails."""

    kubeconfig: Path

    def up(self) -> None:
        """Makes the cluster, with one reserved and three spot workers, and writes `kubeconfig`."""

    def down(self) -> None:
        """Takes away all that `up` and the verbs have made."""

    def load_image(self, references: Sequence[str]) -> None:
        """Brings images of this machine into all workers, under the same references."""

    def add_node(self, name: str, pool: str) -> None:
        """A machine of that name comes, or comes back after its death, and is Ready."""

    def kill_node(self, name: str) -> None:
        """The machine is gone: no goodbye, nothing of it runs or answers any more. What it wrote is all still there."""

    def remove_node(self, name: str) -> None:
        """A dead machine's Node object goes away, as a cloud's controller does it."""

    def freeze(self, name: str) -> None:
        """The machine hangs: all its processes stop, and nothing of it answers."""

    def thaw(self, name: str) -> None:
        """A frozen machine goes on where it was."""

    def stop_api(self) -> None:
        """The API server goes away for all clients."""

    def start_api(self) -> None:
        """It comes back, and answers."""

    def restart_etcd(self) -> None:
        """etcd is killed and comes back with its data; the API server answers again."""

    def kill_process(self, node: str, pod_uid: str, pattern: str) -> int:
        """SIGKILL, from outside, for the pod's processes whose command line holds `pattern`; how many there were."""
