"""One PolyRLJob on the cluster, in a namespace of its own: made from the example, applied, watched, awaited.

Nothing reaches into the operator: all that is known is what `kubectl` shows to everybody.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection
from typing import Any, Final

import yaml
from cluster.tools import Kubectl, call, eventually
from on_cluster.settings import ROOT

EXAMPLE: Final = ROOT / "examples/sort-digits"
COMPLETE_S: Final = 900.0
"""A short job takes two minutes on two busy cores; a fault may cost a minute of waiting for a node."""
WHOLE_S: Final = 300.0
"""A machine counts as lost after 16 s, and a new pod starts in 10; minutes on crowded cores."""
RUNNING_S: Final = 480.0
"""Two images start, a model loads, a first step ends: half a minute on idle cores, minutes on crowded ones."""

Manifest = dict[str, Any]


def short_job(name: str, steps: int = 40) -> Manifest:
    """The example, with only so many RL steps after a little supervised learning, and its faults left out."""
    job: Manifest = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    job["metadata"]["name"] = name
    spec = job["spec"]
    spec.pop("faultInjection")
    spec["recipe"]["sft"]["steps"] = 10
    spec["recipe"]["algorithm"]["steps"] = steps
    spec["recipe"]["evaluation"]["everySteps"] = steps
    spec["recipe"]["checkpoint"]["everySteps"] = 10
    # Labels of the bed's nodes are Karpenter's, so that rollouts go to spot machines and the rest stays off them.
    spec["rollout"] |= {"minReplicas": 2, "capacity": {"preset": "Karpenter"}}
    return job


class Run:
    """A job that was applied."""

    def __init__(self, kubectl: Kubectl, manifest: Manifest) -> None:
        self.kubectl = kubectl
        self.manifest = copy.deepcopy(manifest)
        self.name: str = manifest["metadata"]["name"]

    def apply(self) -> None:
        """Makes the ConfigMap of the example's files, and the job."""
        rendered = yaml.safe_load_all(call("kubectl", "kustomize", str(EXAMPLE)))
        files = next(one for one in rendered if one["kind"] == "ConfigMap")
        for one in (files, self.manifest):
            self.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(one))

    def delete(self) -> None:
        self.kubectl("delete", "polyrljob", self.name, "--ignore-not-found", "--timeout=120s", timeout_s=125)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.kubectl.json("polyrljob", self.name).get("status", {})
        return status

    def condition(self, kind: str) -> dict[str, Any]:
        """The condition of that type; empty when there is none."""
        found = [c for c in self.status().get("conditions", []) if c["type"] == kind]
        return found[0] if found else {}

    def step(self) -> int:
        """RL step under way, as the status tells."""
        return int(self.status().get("manager", {}).get("step", 0))

    def pods(self, role: str) -> list[dict[str, Any]]:
        """All pods of a role that the API server knows, ended ones included."""
        return self.kubectl.items("pods", "-l", f"polyrl.dev/job-name={self.name},polyrl.dev/role={role}")

    def live(self, role: str) -> list[dict[str, Any]]:
        """Those that are ready and not on their way out, oldest first."""
        found = [p for p in self.pods(role) if is_ready(p) and "deletionTimestamp" not in p["metadata"]]
        return sorted(found, key=lambda p: p["metadata"]["creationTimestamp"])

    def await_step(self, step: int) -> None:
        """Until that RL step is under way and the fleet is whole."""
        eventually(f"{self.name} reaches step {step}", lambda: self._over() or self.step() >= step, RUNNING_S)
        assert not self._over(), f"{self.name} was over before step {step}: {self.status()}"

    def _over(self) -> bool:
        return any(self.condition(kind).get("status") == "True" for kind in ("Complete", "Failed"))

    def await_complete(self, timeout_s: float = COMPLETE_S) -> None:
        """Raises AssertionError when it fails, or is not complete in time, with its status."""
        eventually(f"{self.name} ends", self._over, timeout_s, poll_s=1)
        status = self.status()
        assert self.condition("Complete").get("status") == "True", json.dumps(status, indent=1)

    def await_whole(self, without: Collection[str] = (), timeout_s: float = WHOLE_S) -> None:
        """Until as many rollouts are ready as are desired and none of `without` is among them, or the job is over."""

        def whole() -> bool:
            desired = self.status().get("rollout", {}).get("desiredReplicas", -1)
            live = {pod["metadata"]["name"] for pod in self.live("rollout")}
            return self._over() or (len(live) == desired and live.isdisjoint(without))

        eventually(f"{self.name} has all the rollouts that are desired", whole, timeout_s, poll_s=1)

    def await_fleet(self, number: int, timeout_s: float = WHOLE_S) -> None:
        """Until exactly so many rollouts are ready, and no more are there."""

        def there() -> bool:
            running = [pod for pod in self.pods("rollout") if _runs(pod)]
            return self._over() or (len(self.live("rollout")) == number == len(running))

        eventually(f"{self.name} has {number} rollouts", there, timeout_s, poll_s=1)
        assert not self._over(), f"{self.name} was over before it had {number} rollouts"

    def twins(self) -> list[str]:
        """What there is more than once at a moment though it may be there once only."""
        roles = {role: [p["metadata"]["name"] for p in self.pods(role) if _runs(p)] for role in ("manager", "trainer")}
        return [f"{role}: {names}" for role, names in roles.items() if len(names) > 1]


def is_ready(pod: dict[str, Any]) -> bool:
    """Whether the pod's Ready condition holds."""
    conditions = pod["status"].get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _runs(pod: dict[str, Any]) -> bool:
    return pod["status"].get("phase") in ("Pending", "Running") and "deletionTimestamp" not in pod["metadata"]
