"""A cluster in virtual time: API server, scheduler, kubelets and controllers, as far as one job can tell them apart.

Objects are raw, as the real API gives them, each with a resourceVersion; every change is kept in `log`, so that a
reader may lag behind it. Nodes come one per pod while a pool has room. Nothing runs; `pass_time` does what is due.
"""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.cluster.timestamps import millisecond, unix
from polyrl.sample import Pool
from polyrl.worker import Role

BOOT_S: Final = 5.0
"""From a node to a running container that has dialled the manager."""
TAINTED_S: Final = 20.0
"""How long our pods tolerate a node that is not ready."""
FORGOTTEN_S: Final = 40.0
"""After which pods of a node that is gone are removed by PodGC."""
DEFAULT_GRACE_S: Final = 30

Place = tuple[str, str]
"""Kind and name."""


class Conflict(Exception):
    """409: the name is taken, or the object is another one by now."""


class Forbidden(Exception):
    """403: a quota."""


@dataclass
class FakeCluster:
    """Times are Unix seconds."""

    job: Object
    now: float = 1_000_000.0
    room: dict[str, int] = field(default_factory=lambda: {pool.value: 1 << 20 for pool in Pool})
    """Nodes that each pool can give at once."""
    quota: int | None = None
    """Pods that may exist and not have ended; None: any number."""
    objects: dict[Place, Object] = field(default_factory=dict)
    log: list[tuple[Place, int, Object | None]] = field(default_factory=list)
    """Every change in order: place, resourceVersion, and what is there since."""
    tick_s: float = 1.0
    """How often controllers and kubelets act."""
    asleep: set[str] = field(default_factory=set)
    """Nodes whose kubelet does not answer."""
    unheard: set[str] = field(default_factory=set)
    """Pods whose agent cannot reach the manager, though their node is well."""
    pauses_trainer: bool = False
    """The trainer's Job makes no pod for now, as after a failure."""
    made: list[str] = field(default_factory=list)
    """UIDs of all pods that ever were."""
    _version: int = 0
    _uids: int = 0

    def __post_init__(self) -> None:
        self.job["metadata"] |= {"uid": "job", "generation": 1, "creationTimestamp": millisecond(self.now)}
        self.put("PolyRLJob", self.job)

    def create(self, raw: Object) -> Object:
        """POST. Raises Conflict when the name is taken, Refused when the quota is used up."""
        kind, new = raw["kind"], deepcopy(raw)
        if (kind, new["metadata"]["name"]) in self.objects:
            raise Conflict
        counted = sum(not is_ended(pod) for pod in self.pods())
        if kind == "Pod" and self.quota is not None and counted >= self.quota:
            raise Forbidden("exceeded quota: pods")
        self._uids += 1
        new["metadata"] |= {"uid": f"{kind.lower()}-{self._uids}", "creationTimestamp": millisecond(self.now)}
        new.setdefault("status", {})
        if kind == "Pod":
            new["status"] = {"phase": "Pending", "conditions": []}
            self.made.append(new["metadata"]["uid"])
        return self.put(kind, new)

    def delete(self, kind: str, name: str, uid: str, grace_s: int | None = None) -> None:
        """DELETE with a uid as precondition. Raises Conflict for another object; one that is gone is fine."""
        there = self.objects.get((kind, name))
        if there is None:
            return
        if there["metadata"]["uid"] != uid:
            raise Conflict
        if kind == "Job":
            for pod in self.pods(Role.TRAINER):
                self.delete("Pod", pod["metadata"]["name"], pod["metadata"]["uid"])
        limited = kind != "Pod" or not there["spec"].get("nodeName") or is_ended(there) or grace_s == 0
        if limited:
            self.drop(kind, name)
        elif "deletionTimestamp" not in there["metadata"]:
            grace = grace_s or there["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)
            timestamp = {"deletionTimestamp": millisecond(self.now + grace), "deletionGracePeriodSeconds": grace}
            self.patch(kind, name, {"metadata": there["metadata"] | timestamp})

    def annotate(self, name: str, uid: str, annotations: dict[str, str]) -> None:
        """PATCH of a pod's annotations; one that is gone or another by now is left alone."""
        there = self.objects.get(("Pod", name))
        if there is not None and there["metadata"]["uid"] == uid:
            kept = there["metadata"].get("annotations", {})
            self.patch("Pod", name, {"metadata": there["metadata"] | {"annotations": kept | annotations}})

    def patch(self, kind: str, name: str, change: Object) -> Object:
        """Replaces top-level parts of an object."""
        return self.put(kind, self.objects[kind, name] | deepcopy(change))

    def apply(self, raw: Object) -> Object:
        """Server-side apply: as described, with the uid that it has."""
        there = self.objects[raw["kind"], raw["metadata"]["name"]]
        return self.put(raw["kind"], raw | {"metadata": {"uid": there["metadata"]["uid"], **raw["metadata"]}})

    def put(self, kind: str, raw: Object) -> Object:
        """Stores an object under a new resourceVersion."""
        self._version += 1
        new = raw | {"kind": kind, "metadata": raw["metadata"] | {"resourceVersion": str(self._version)}}
        place = (kind, raw["metadata"]["name"])
        self.objects[place] = new
        self.log.append((place, self._version, new))
        return new

    def drop(self, kind: str, name: str) -> None:
        """Removes an object."""
        self._version += 1
        if self.objects.pop((kind, name), None) is not None:
            self.log.append(((kind, name), self._version, None))

    def pods(self, role: Role | None = None) -> list[Object]:
        """All pods, or those of one role."""
        found = [raw for (kind, _), raw in self.objects.items() if kind == "Pod"]
        return [raw for raw in found if role is None or role_of(raw) == role.value]

    def trainer(self) -> Object | None:
        """The trainer's Job."""
        return next((raw for (kind, _), raw in self.objects.items() if kind == "Job"), None)

    def serves(self, pod: Object) -> bool:
        """The pod's container runs and reaches the others."""
        node = pod["spec"].get("nodeName", "")
        runs = pod["status"]["phase"] == "Running" and ("Node", node) in self.objects
        return runs and node not in self.asleep and pod["metadata"]["name"] not in self.unheard

    def pass_time(self, seconds: float) -> None:
        """Lets everything happen that is due by then."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + self.tick_s)
            self._run_trainer()
            self._schedule()
            for pod in self.pods():
                self._age(pod)

    # What a test injects.

    def lose_node(self, name: str) -> None:
        """The machine is gone and the cloud says so."""
        self.drop("Node", name)

    def silence_node(self, name: str) -> None:
        """The machine answers no more; the node controller has noticed."""
        self.asleep.add(name)
        self._set_ready(name, False)

    def wake_node(self, name: str) -> None:
        """The machine answers again."""
        self.asleep.discard(name)
        if ("Node", name) in self.objects:
            self._set_ready(name, True)

    def taint_node(self, name: str, key: str) -> None:
        """Adds a taint."""
        node = self.objects["Node", name]
        taints = [*node["spec"].get("taints", []), {"key": key, "effect": "NoSchedule"}]
        self.patch("Node", name, {"spec": node["spec"] | {"taints": taints}})

    def end_pod(self, name: str, code: int, reason: str = "", disruption: str = "") -> None:
        """All containers of the pod end."""
        pod = self.objects["Pod", name]
        containers = [one["name"] for one in pod["spec"]["containers"]]
        ended = [{"name": one, "state": {"terminated": {"exitCode": code, "reason": "Error"}}} for one in containers]
        conditions = [one for one in pod["status"]["conditions"] if one["type"] != "Ready"]
        if disruption:
            conditions.append({"type": "DisruptionTarget", "status": "True", "reason": disruption})
        phase = "Failed" if code or disruption else "Succeeded"
        status = {"phase": phase, "reason": reason, "containerStatuses": ended, "conditions": conditions}
        self.patch("Pod", name, {"status": status})

    def end_trainer(self, condition: str, reason: str = "", message: str = "") -> None:
        """The Job is Complete or Failed."""
        job = self.trainer()
        if job is None:
            return
        timestamp = millisecond(self.now)
        ended = {
            "type": condition,
            "status": "True",
            "reason": reason,
            "message": message,
            "lastTransitionTime": timestamp,
        }
        for pod in self.pods(Role.TRAINER):
            if not is_ended(pod):
                self.end_pod(pod["metadata"]["name"], 0 if condition == "Complete" else 1)
        self.patch("Job", job["metadata"]["name"], {"status": {"active": 0, "ready": 0, "conditions": [ended]}})

    def edit(self, **spec: Any) -> None:
        """A user changes parts of the spec."""
        place = ("PolyRLJob", self.job["metadata"]["name"])
        job = self.objects[place]
        metadata = job["metadata"] | {"generation": job["metadata"]["generation"] + 1}
        self.patch(*place, {"metadata": metadata, "spec": job["spec"] | spec})

    # What controllers and kubelets do.

    def _set_ready(self, name: str, ready: bool) -> None:
        status = "True" if ready else "Unknown"
        ready_condition = {
            "type": "Ready",
            "status": status,
            "reason": "Kubelet",
            "lastTransitionTime": millisecond(self.now),
        }
        taints = [] if ready else [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]
        node = self.objects["Node", name]
        self.patch(
            "Node", name, {"spec": node["spec"] | {"taints": taints}, "status": {"conditions": [ready_condition]}}
        )

    def _run_trainer(self) -> None:
        job = self.trainer()
        if job is None or any(one["type"] in ("Complete", "Failed") for one in job["status"].get("conditions", [])):
            return
        ours = [pod for pod in self.pods(Role.TRAINER) if not is_ended(pod) and pod["metadata"].get("job") == _uid(job)]
        pods = [pod for pod in ours if "deletionTimestamp" not in pod["metadata"]]
        if job["spec"].get("suspend"):
            for pod in pods:
                self.delete("Pod", pod["metadata"]["name"], pod["metadata"]["uid"])
        elif not ours and not self.pauses_trainer:  # podReplacementPolicy is Failed with every podFailurePolicy
            metadata = deepcopy(job["spec"]["template"]["metadata"])
            metadata |= {"name": f"{job['metadata']['name']}-0-{self._uids}", "job": _uid(job)}
            with suppress(Forbidden):
                self.create({"kind": "Pod", "metadata": metadata, "spec": deepcopy(job["spec"]["template"]["spec"])})
        # As the Job controller counts: `active` leaves out what is being deleted, and is 0 from then on.
        ready = sum(self.serves(pod) for pod in pods)
        stopped = [{"type": "Suspended", "status": "True"}] if job["spec"].get("suspend") else []
        now = {"active": len(pods), "ready": ready, "terminating": len(ours) - len(pods), "conditions": stopped}
        if any(job.get("status", {}).get(key) != value for key, value in now.items()):
            self.patch("Job", job["metadata"]["name"], {"status": job.get("status", {}) | now})

    def _schedule(self) -> None:
        for pod in self.pods():
            if pod["spec"].get("nodeName") or is_ended(pod):
                continue
            pool = pod["metadata"]["labels"].get(names.LABEL_POOL, Pool.RESERVED.value)
            if sum(self._pool_of(other) == pool for other in self.pods() if self._holds(other)) < self.room[pool]:
                self._bind(pod)

    def _pool_of(self, pod: Object) -> str:
        return str(pod["metadata"]["labels"].get(names.LABEL_POOL, Pool.RESERVED.value))

    def _holds(self, pod: Object) -> bool:
        return bool(pod["spec"].get("nodeName")) and not is_ended(pod)

    def _bind(self, pod: Object) -> None:
        self._uids += 1
        node, timestamp = f"node-{self._uids}", millisecond(self.now)
        metadata = {"name": node, "uid": node, "creationTimestamp": timestamp}
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": timestamp}
        self.put("Node", {"metadata": metadata, "spec": {}, "status": {"conditions": [ready]}})
        placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp}
        status = pod["status"] | {"conditions": [placed]}
        self.patch("Pod", pod["metadata"]["name"], {"spec": pod["spec"] | {"nodeName": node}, "status": status})

    def _age(self, pod: Object) -> None:
        name, metadata, node = pod["metadata"]["name"], pod["metadata"], pod["spec"].get("nodeName", "")
        if not node or ("Pod", name) not in self.objects:
            return
        machine = self.objects.get(("Node", node))
        deleted_at, placed_at = unix(metadata.get("deletionTimestamp")), placed(pod)
        if machine is None:
            if self.now - placed_at >= FORGOTTEN_S:
                self.drop("Pod", name)
        elif node in self.asleep:
            since = unix(machine["status"]["conditions"][0]["lastTransitionTime"]) or self.now
            if deleted_at is None and self.now - since >= TAINTED_S:
                self.delete("Pod", name, metadata["uid"])
        elif deleted_at is not None and self.now >= deleted_at:
            self.drop("Pod", name)
        elif pod["status"]["phase"] == "Pending" and self.now - placed_at >= BOOT_S:
            conditions = [*pod["status"]["conditions"], {"type": "Ready", "status": "True"}]
            self.patch("Pod", name, {"status": pod["status"] | {"phase": "Running", "conditions": conditions}})


def _uid(raw: Object) -> str:
    return str(raw["metadata"]["uid"])


def role_of(pod: Object) -> str:
    """As labelled."""
    return str(pod["metadata"]["labels"][names.LABEL_ROLE])


def is_ended(pod: Object) -> bool:
    """No container of it runs or will run again."""
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def placed(pod: Object) -> float:
    """When it got its node."""
    timestamps = [one["lastTransitionTime"] for one in pod["status"]["conditions"] if one["type"] == "PodScheduled"]
    return (unix(timestamps[0]) if timestamps else None) or 0.0
