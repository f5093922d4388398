"""The manager of a job on a cluster, asked from inside its own pod with the right to run commands there: nothing is
forwarded, and its token stays where it is."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import msgspec

from polyrl.cluster import names
from polyrl.cluster.actions import Object
from polyrl.control import PAGE_PATH, History, Waits
from polyrl.errors import UNDECODABLE, RunFailed, UserError
from polyrl.page.page import without_scripts
from polyrl.status import ManagerStatus
from polyrl.worker import Role
from polyrl_cli.remote import ask_in_container
from polyrl_cli.remote.chaos import PodWorker, live_workers
from polyrl_cli.remote.cluster import ClusterOptions, UserCluster, user_cluster
from polyrl_cli.remote.execution import output_of
from polyrl_operator.api.kinds import POD

MAX_ANSWER_BYTES: Final = 64 << 20
"""Bytes of one answer; a history of 4,000 rows is 8 MB."""
FOLLOWS_S: Final = 3600.0
"""Longest time that one command runs in the pod; after it another one goes on."""
PAUSE_S: Final = 1.0
"""Between two answers; a person sees no more."""
PAGE_ANSWER_S: Final = 60.0
"""An interpreter that starts in a container with a tenth of a core takes several seconds."""
DEFAULT_PORT: Final = 5000
"""As the manifest's `manager.port`."""


class Snapshot(msgspec.Struct, frozen=True):
    """What the manager says at one moment; of its history what is new."""

    status: ManagerStatus
    history: History
    waits: Waits


def page_of_job(job: str, options: ClusterOptions) -> str:
    """The page of the run as its manager serves it. Raises UserError when there is no job, or no manager at work."""

    async def read() -> str:
        async with user_cluster(options) as cluster, asyncio.timeout(PAGE_ANSWER_S):
            stored = await cluster.job(job)
            body = b""
            async with aclosing(await _ask(cluster, stored, {"path": PAGE_PATH})) as output:
                async for part in output:
                    body += part
                    if len(body) > MAX_ANSWER_BYTES:
                        raise RunFailed(f"{job}: its manager sends something longer than a page")
            # A manager's image may be anybody's, and what it sends becomes a file that a browser opens.
            return without_scripts(body.decode(errors="replace"))

    try:
        return asyncio.run(read())
    except TimeoutError:
        raise RunFailed(f"{job}: its manager did not answer within {PAGE_ANSWER_S:g} s") from None


async def snapshots(cluster: UserCluster, stored: Object, *, once: bool) -> AsyncGenerator[Snapshot, None]:
    """One after another as the run goes on, the first with all that the manager remembers; ends with the run.
    Raises UserError when there is no manager at work, RunFailed when it sends something else."""
    order = {"follow": 0.0 if once else FOLLOWS_S, "pause": PAUSE_S}
    left = b""
    async with aclosing(await _ask(cluster, stored, order)) as output:
        async for part in output:
            left += part
            while b"\n" in left:
                line, _, left = left.partition(b"\n")
                try:
                    yield msgspec.json.decode(line, type=Snapshot)
                except UNDECODABLE as error:
                    raise RunFailed(f"the manager sends no status: {error}") from error
            if len(left) > MAX_ANSWER_BYTES:
                raise RunFailed("the manager sends no status but something longer")


async def _ask(cluster: UserCluster, stored: Object, question: dict[str, Any]) -> Any:
    worker = await _manager(cluster, stored["metadata"]["name"])
    port = (stored["spec"].get("manager") or {}).get("port", DEFAULT_PORT)
    order = {"keys": names.KEYS_DIR, "port": port, **question}
    command = worker.argv[0], "-c", inspect.getsource(ask_in_container), json.dumps(order)
    return output_of(cluster, worker.pod, worker.container, command)


async def _manager(cluster: UserCluster, job: str) -> PodWorker:
    pages = cluster.client.pages(POD, cluster.namespace, names.selector(job, Role.MANAGER))
    workers = live_workers([pod async for pods, _ in pages for pod in pods])
    if not workers:
        raise UserError(
            f"{job} has no manager at work: it has not begun, or has ended; polyrl get fetches what it left"
        )
    return workers[-1]
