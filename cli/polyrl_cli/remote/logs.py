"""`polyrl logs JOB`: what a job's containers print, each line with its pod, also of pods that come later.

Logs of pods that are gone are the cluster's log collector's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import NamedTuple

import aiohttp

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.errors import UserError
from polyrl.worker import Role
from polyrl_cli.remote.cluster import ClusterOptions, UserCluster, user_cluster
from polyrl_cli.remote.status import ended
from polyrl_operator.api.client import ApiError
from polyrl_operator.api.kinds import POD

Emit = Callable[[str], None]


class ContainerLog(NamedTuple):
    """One life of one container: a restarted one prints anew."""

    pod: str
    container: str
    restarts: int


def print_logs(name: str, role: Role | None, follow: bool, options: ClusterOptions, emit: Emit) -> None:
    """Prints what the job's pods have printed; `follow` goes on until the job is over and its pods have ended.

    Raises UserError when there is no such job, no pod yet (without `follow`) or no cluster.
    """
    asyncio.run(_print(name, role, follow, options, emit))


def containers_with_log(pod: Object) -> Iterator[ContainerLog]:
    """Containers of a pod that have a log, sidecars included."""
    status = pod.get("status") or {}
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        if {"running", "terminated"} & (container.get("state") or {}).keys():
            yield ContainerLog(pod["metadata"]["name"], container["name"], restarts=container.get("restartCount", 0))


async def _print(name: str, role: Role | None, follow: bool, options: ClusterOptions, emit: Emit) -> None:
    selector = f"{names.LABEL_JOB}={name}" if role is None else names.selector(name, role)
    async with user_cluster(options) as cluster:
        job = await cluster.job(name)
        copies: dict[ContainerLog, asyncio.Task[None]] = {}
        async for change, pods in cluster.changes(POD, label_selector=selector):
            for container in (container for pod in pods for container in containers_with_log(pod)):
                if container not in copies:
                    copies[container] = asyncio.create_task(_copy(cluster, container, follow, emit))
            if change == "LIST" and not pods and (not follow or ended(job)):
                whose = f"no {role.value} pods" if role else "no pods"
                raise UserError(f"{name} has {whose} in namespace {cluster.namespace} now")
            if not follow or (pods and all(_is_over(pod) for pod in pods) and ended(await cluster.job(name))):
                break
        await asyncio.gather(*copies.values())


def _is_over(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed") or "deletionTimestamp" in pod["metadata"]


async def _copy(cluster: UserCluster, container: ContainerLog, follow: bool, emit: Emit) -> None:
    prefix = f"[{container.pod} {container.container}] "
    try:
        async for line in cluster.lines(cluster.log_url(container.pod, container.container, follow)):
            emit(prefix + line.decode(errors="replace").rstrip("\n"))
    except ApiError as error:
        emit(f"{prefix}(no log: {error})")
    except (aiohttp.ClientError, TimeoutError) as error:
        emit(f"{prefix}(the log broke off: {error or type(error).__name__})")
