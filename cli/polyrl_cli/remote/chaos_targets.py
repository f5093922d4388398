"""Whom a fault may hit among a job's pods: its live workers, each with the container that it runs in.

A worker goes by the name of its pod; the reserved engine, a container of the trainer's pod, is `reserved` as in a local
run. Refuses to hold: who of them is hit (see `faults`). Read next: `chaos_on_pods`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.errors import UserError
from polyrl.local.fleet import ObservedWorker, WorkerPhase
from polyrl.worker import Role
from polyrl_cli.chaos.faults import Fault, FaultRequest
from polyrl_cli.chaos.kinds import ChaosAction, Target

PROGRAM_WORDS: Final = 3
"""Of a worker's command line: interpreter, -m, module. The rest may hold variables that the kubelet fills in."""

_INIT: Final = "is process 1 of its container, which nothing inside can {what}"
_INSTEAD: Final = {
    Target.AGENT: "freeze or slow its engine (--role engine), or cut it off (partition)",
    Target.MANAGER: "kill it, or cut agents off from it (partition)",
    Target.TRAINER: "kill it",
}


@dataclass(frozen=True)
class PodWorker:
    """A live worker and where it is."""

    seen: ObservedWorker
    pod: str
    uid: str
    container: str
    argv: tuple[str, ...]
    """How its command line begins; the first word is the container's Python."""


def live_workers(pods: Sequence[Object]) -> list[PodWorker]:
    """Those whose container runs, in pods that nobody is ending."""
    return [worker for pod in pods if "deletionTimestamp" not in pod["metadata"] for worker in _running(pod)]


def check_in_pods(wish: FaultRequest) -> None:
    """Raises UserError for what can be done to a process of this machine but to none in a pod."""
    if wish.action in (ChaosAction.FREEZE, ChaosAction.SLOW) and wish.target is not Target.ENGINE:
        init = _INIT.format(what="stop")
        raise UserError(f"--role {wish.target}: in a pod the {wish.target} {init}; {_INSTEAD[wish.target]}")


def check_victim(fault: Fault) -> None:
    """Raises UserError when this one of its role cannot be hit so."""
    if fault.role is Role.RESERVED and fault.action is ChaosAction.KILL and fault.target is Target.AGENT:
        init = _INIT.format(what="kill")
        raise UserError(f"{fault.victim}: in a pod its agent {init}; kill its engine (--role engine), or the trainer")


def _running(pod: Object) -> Iterator[PodWorker]:
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status") or {}
    role = metadata["labels"].get(names.LABEL_ROLE)
    states = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    running = {one["name"] for one in states if "running" in (one.get("state") or {})}
    for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
        name = container["name"]
        if name in running and name in (role, Role.RESERVED):
            called = name if name == Role.RESERVED else metadata["name"]
            seen = ObservedWorker(called, Role(name), metadata["uid"], WorkerPhase.RUNNING, started_at=0.0)
            argv = tuple(container["command"][:PROGRAM_WORDS])
            yield PodWorker(seen, metadata["name"], metadata["uid"], name, argv)
