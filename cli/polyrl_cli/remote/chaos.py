"""`polyrl chaos ACTION JOB --on kubernetes`: one fault on the pods of a job, with the rights of whoever asks.

    kill, preempt            the pod is deleted; who is killed has been cut off before, so that it hands nothing back
    kill --role engine       a signal from inside the container (see `pod_drill`)
    freeze, slow, partition  the same; undone from inside, whatever becomes of this command

The operator is not asked: it sees what it would see of a real fault.
Refuses to hold: who is hit (see `faults`, `pod_victims`). Read next: `pod_drill`.
"""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Final

import msgspec

from polyrl.cluster import names
from polyrl.errors import RunFailed, UserError
from polyrl_cli.chaos import in_container
from polyrl_cli.chaos.command import with_seed
from polyrl_cli.chaos.faults import Fault, FaultRequest, choose_victim
from polyrl_cli.chaos.kinds import ChaosAction, Target
from polyrl_cli.chaos.signals import signals_of
from polyrl_cli.local.process_fleet import Part
from polyrl_cli.remote.chaos_targets import PodWorker, check_in_pods, check_victim, live_workers
from polyrl_cli.remote.cluster import ClusterOptions, UserCluster, user_cluster
from polyrl_cli.remote.exec import first_line
from polyrl_operator.api.kinds import POD

KILL_GRACE_S: Final = 1
"""Between SIGTERM and SIGKILL. With 0 the object would go two or three seconds before its containers, and a second
manager might start beside the first."""

SILENCE_S: Final = 10.0
"""An agent to be killed is cut off for so long: until it is dead, or until the deletion was refused."""


def cluster_chaos_line(job: str, wish: FaultRequest, seed: int | None, where: ClusterOptions) -> str:
    """Who was hit, how, and the seed that would choose the same again among the same pods.

    Raises UserError when nothing was done, RunFailed when it is not known what was.
    """
    check_in_pods(wish)
    drawn = with_seed(wish, seed)

    async def strike() -> str:
        async with user_cluster(where) as cluster:
            await cluster.job(job)
            return f"{job} in namespace {cluster.namespace}: {await _strike(cluster, job, drawn)} (seed {drawn.seed})"

    return asyncio.run(strike())


async def _strike(cluster: UserCluster, job: str, wish: FaultRequest) -> str:
    pages = cluster.client.pages(POD, cluster.namespace, f"{names.LABEL_JOB}={job}")
    workers = {worker.seen.name: worker for worker in live_workers([pod async for pods, _ in pages for pod in pods])}
    # An agent is asked itself whether it listens; what the manager knows is not seen from here.
    fault = choose_victim(wish, [worker.seen for worker in workers.values()], workers)
    check_victim(fault)
    victim = workers[fault.victim]
    if fault.lasts or fault.target is Target.ENGINE:
        await _inside(cluster, victim, fault)
        return str(fault)
    if fault.action is ChaosAction.KILL and fault.target is Target.AGENT:
        await _silence(cluster, victim, fault)
    return await _delete(cluster, victim, fault)


async def _inside(cluster: UserCluster, victim: PodWorker, fault: Fault) -> None:
    """Raises UserError when it was not done."""
    answer = await _ask(cluster, victim, fault)
    refused = {
        in_container.GONE: fault.nobody,
        in_container.BUSY: fault.another,
        in_container.DEAF: f"{fault.victim}: it has not greeted the manager yet; wait, or name another one (--worker)",
    }
    if answer in refused:
        raise UserError(refused[answer])
    if answer != in_container.DONE:
        raise RunFailed(f"{fault.victim}: an answer from inside that means nothing: {answer}")


async def _silence(cluster: UserCluster, victim: PodWorker, fault: Fault) -> None:
    """One that does not listen yet, or is cut off already, has nothing to hand back."""
    cut = msgspec.structs.replace(fault, action=ChaosAction.PARTITION, seconds=SILENCE_S)
    await _ask(cluster, victim, cut)


async def _ask(cluster: UserCluster, victim: PodWorker, fault: Fault) -> str:
    return await first_line(cluster, victim.pod, victim.container, injection_command(victim, fault))


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


async def _delete(cluster: UserCluster, victim: PodWorker, fault: Fault) -> str:
    grace_s = max(KILL_GRACE_S, math.ceil(fault.seconds)) if fault.action is ChaosAction.PREEMPT else KILL_GRACE_S
    if await cluster.client.delete(POD, cluster.namespace, victim.pod, victim.uid, grace_s) is None:
        raise UserError(f"{victim.pod}: is gone meanwhile")
    told = msgspec.structs.replace(fault, seconds=float(grace_s))
    return f"{told}; its pod is deleted with a grace of {grace_s} s"
