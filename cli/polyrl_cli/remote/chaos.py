"""`polyrl chaos ACTION JOB --on kubernetes`: one fault on the pods of a job, with the rights of whoever asks.

    kill, preempt            the pod is deleted; a killed agent is cut off first, so that it hands nothing back
    kill --role engine       a signal from inside the container (see `chaos.in_container`)
    freeze, slow, partition  the same; undone from inside, whatever becomes of this command

The operator has no part in it: it sees what it would see of a real fault. A worker goes by the name of its pod; the
reserved engine, a process of the trainer's container, is `reserved` as in a local run; of several it is the oldest.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.errors import RunFailed, UserError
from polyrl.local.planner import ObservedWorker, WorkerPhase
from polyrl.worker import ENGINES_MODULE, Role
from polyrl_cli.chaos import in_container
from polyrl_cli.chaos.faults import Fault, FaultRequest, choose_victim, signals_of
from polyrl_cli.chaos.kinds import ChaosAction, Part, Target
from polyrl_cli.remote.cluster import ClusterOptions, UserCluster, user_cluster
from polyrl_cli.remote.execution import output_of
from polyrl_operator.api.kinds import POD

KILL_GRACE_S: Final = 1
"""Between SIGTERM and SIGKILL. With 0 the object would go two or three seconds before its containers, and a second
manager might start beside the first."""

ISOLATION_S: Final = 10.0
"""An agent to be killed is cut off for so long: until it is dead, or until the deletion was refused."""

PROGRAM_WORDS: Final = 3
"""Words of a worker's command line that name its program: interpreter, -m, module. The rest may hold variables that the
kubelet fills in."""

_PROCESS_1: Final = "is process 1 of its container, which nothing inside can stop"
_INSTEAD: Final = {
    Target.AGENT: "freeze or slow its engine (--role engine), or cut it off (partition)",
    Target.MANAGER: "kill it, or cut agents off from it (partition)",
    Target.TRAINER: "kill it",
}

EXEC_ANSWER_S: Final = 30.0
"""An interpreter that starts in a container with a tenth of a core takes several seconds."""


@dataclass(frozen=True)
class PodWorker:
    """A live worker and where it is."""

    seen: ObservedWorker
    pod: str
    uid: str
    container: str
    argv: tuple[str, ...]
    """How its command line begins; the first word is the container's Python."""


def inject_on_cluster(job: str, request: FaultRequest, options: ClusterOptions) -> str:
    """Injects the fault; returns what was done and where.

    Raises UserError when nothing was done, RunFailed when it is not known what was.
    """
    check_in_pods(request)

    async def inject() -> str:
        async with user_cluster(options) as cluster:
            await cluster.job(job)
            return f"{job} in namespace {cluster.namespace}: {await _inject(cluster, job, request)}"

    return asyncio.run(inject())


def live_workers(pods: Sequence[Object]) -> list[PodWorker]:
    """Workers whose container runs, in pods that nobody is ending."""
    return [worker for pod in pods if "deletionTimestamp" not in pod["metadata"] for worker in _running(pod)]


def check_in_pods(request: FaultRequest) -> None:
    """Raises UserError for what can be done to a process of this machine but to none in a pod."""
    if request.action in (ChaosAction.FREEZE, ChaosAction.SLOW) and request.target is not Target.ENGINE:
        raise UserError(
            f"--role {request.target}: in a pod the {request.target} {_PROCESS_1}; {_INSTEAD[request.target]}"
        )


def injection_command(victim: PodWorker, fault: Fault) -> tuple[str, ...]:
    """What is run in the victim's container."""
    signals = signals_of(fault)
    order = {
        "argv": victim.argv,
        "below": signals.part is Part.BELOW,
        "listens": fault.action is ChaosAction.PARTITION,
        "begin": int(signals.begin),
        "undo": int(signals.undo),
        "on": signals.on_s,
        "off": signals.off_s,
        "seconds": fault.seconds,
    }
    return victim.argv[0], "-c", Path(in_container.__file__).read_text(), json.dumps(order)


def _running(pod: Object) -> Iterator[PodWorker]:
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status") or {}
    role = metadata["labels"].get(names.LABEL_ROLE)
    states = status.get("containerStatuses") or ()
    running = {state["name"] for state in states if "running" in (state.get("state") or {})}
    for container in spec["containers"]:
        if (name := container["name"]) not in running or name != role:
            continue
        for called, part, argv in _programs(container["command"], Role(name), metadata["name"]):
            seen = ObservedWorker(called, part, uid=metadata["uid"], phase=WorkerPhase.RUNNING, started_at=0.0)
            yield PodWorker(seen, metadata["name"], uid=metadata["uid"], container=name, argv=argv)


def _programs(command: Sequence[str], role: Role, pod: str) -> Iterator[tuple[str, Role, tuple[str, ...]]]:
    """The container's own, and in a trainer's with engines their agent."""
    yield pod, role, tuple(command[:PROGRAM_WORDS])
    if ENGINES_MODULE in command[:PROGRAM_WORDS]:
        first = command.index("--") + 1
        yield Role.RESERVED.value, Role.RESERVED, tuple(command[first : first + PROGRAM_WORDS])


async def _inject(cluster: UserCluster, job: str, request: FaultRequest) -> str:
    pages = cluster.client.pages(POD, cluster.namespace, f"{names.LABEL_JOB}={job}")
    workers = {worker.seen.name: worker for worker in live_workers([pod async for pods, _ in pages for pod in pods])}
    # An agent is asked itself whether it handles the signal; what the manager knows is not seen from here.
    fault = choose_victim(request, [worker.seen for worker in workers.values()], greeted=workers)
    victim = workers[fault.victim]
    if fault.lasts or fault.target is Target.ENGINE or fault.role is Role.RESERVED:
        _require_done(await _run_inside(cluster, victim, fault), fault)
        return str(fault)
    if fault.action is ChaosAction.KILL and fault.target is Target.AGENT:
        # Whatever it answers: one that has no handler yet, or is cut off already, has nothing to hand back.
        isolation = msgspec.structs.replace(fault, action=ChaosAction.PARTITION, seconds=ISOLATION_S)
        await _run_inside(cluster, victim, isolation)
    return await _delete(cluster, victim, fault)


async def _run_inside(cluster: UserCluster, victim: PodWorker, fault: Fault) -> str:
    return await first_line(cluster, victim.pod, victim.container, injection_command(victim, fault))


def _require_done(answer: str, fault: Fault) -> None:
    refused = {
        in_container.GONE: fault.no_process,
        in_container.BUSY: fault.busy,
        in_container.DEAF: f"{fault.victim}: it has not greeted the manager yet; wait, or name another one (--worker)",
    }
    if answer in refused:
        raise UserError(refused[answer])
    if answer != in_container.DONE:
        raise RunFailed(f"{fault.victim}: an answer from inside that means nothing: {answer}")


async def _delete(cluster: UserCluster, victim: PodWorker, fault: Fault) -> str:
    grace_s = max(KILL_GRACE_S, math.ceil(fault.seconds)) if fault.action is ChaosAction.PREEMPT else KILL_GRACE_S
    if await cluster.client.delete(POD, cluster.namespace, victim.pod, victim.uid, grace_s) is None:
        raise UserError(f"{victim.pod}: is gone meanwhile")
    done = msgspec.structs.replace(fault, seconds=float(grace_s))
    return f"{done}; its pod is deleted with a grace of {grace_s} s"


async def first_line(cluster: UserCluster, pod: str, container: str, command: Sequence[str]) -> str:
    """The first line of the command's output, without the line's end.

    Raises UserError when the cluster refuses or the container is gone, RunFailed when no line comes.
    """
    written = b""
    try:
        async with asyncio.timeout(EXEC_ANSWER_S), aclosing(output_of(cluster, pod, container, command)) as output:
            async for part in output:
                written += part
                if b"\n" in written:
                    return written.split(b"\n")[0].decode(errors="replace")
    except TimeoutError:
        raise RunFailed(f"{pod} {container}: no answer from inside within {EXEC_ANSWER_S:g} s") from None
    raise RunFailed(f"{pod} {container}: the command said nothing")
