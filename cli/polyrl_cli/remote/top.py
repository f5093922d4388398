"""`polyrl top JOB --on kubernetes`: the picture of a run on a cluster, by what its manager says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Final

from pydantic import ValidationError
from rich.console import Console
from rich.live import Live

from polyrl.cluster.actions import Object
from polyrl.errors import UserError
from polyrl.history.foreign_text import printable
from polyrl.manifest.job import JobSpec
from polyrl_cli.remote.cluster import ClusterOptions, UserCluster, user_cluster
from polyrl_cli.remote.manager import Snapshot, snapshots
from polyrl_cli.report.progress import SHOWN_WAITS, Progress, picture
from polyrl_cli.report.terminal import terminal

AGAIN_S: Final = 2.0
"""Before the manager is asked anew when an answer has ended and the run has not."""
RESUMED: Final = "its manager was started again, and knows nothing from before"


def show_job_top(job: str, options: ClusterOptions, *, once: bool) -> None:
    """Shows the run until it ends or the user has seen enough; once only where nobody watches a terminal. Raises
    UserError when there is no such job, or no manager at work."""
    console = terminal()
    with suppress(KeyboardInterrupt):
        asyncio.run(_watch(job, options, console, once=once or not console.is_terminal))


async def _watch(job: str, options: ClusterOptions, console: Console, *, once: bool) -> None:
    async with user_cluster(options) as cluster:
        stored = await cluster.job(job)
        shown = _begun(stored, time.time())
        if once:
            async for progress in _pictures(cluster, stored, once=True):
                shown = progress
        else:
            with Live(get_renderable=lambda: picture(shown, console.width), console=console, transient=True):
                while not shown.status.finished:
                    async for progress in _pictures(cluster, stored, once=False):
                        shown = progress
                    await asyncio.sleep(AGAIN_S)
        console.print(picture(shown, console.width))


async def _pictures(cluster: UserCluster, stored: Object, *, once: bool) -> AsyncIterator[Progress]:
    """The run as one conversation with its manager tells it, which begins with all that there is."""
    progress: Progress | None = None
    async with aclosing(snapshots(cluster, stored, once=once)) as answers:
        async for snapshot in answers:
            progress = progress or _begun(stored, snapshot.history.began)
            take(progress, snapshot)
            yield progress


def _begun(stored: Object, began: float) -> Progress:
    name = printable(stored["metadata"]["name"])
    try:
        return Progress(name, JobSpec.model_validate(stored["spec"]), time.time, began)
    except ValidationError as error:
        raise UserError(f"{name}: another version's manifest: {error.errors()[0]['msg']}") from error


def take(progress: Progress, snapshot: Snapshot) -> None:
    """Adds what is new."""
    progress.take(snapshot.status, (RESUMED,) if snapshot.history.resumed else ())
    progress.waits = [printable(wait) for wait in snapshot.waits.waits[:SHOWN_WAITS]]
    progress.held = snapshot.history.seconds, snapshot.history.machines
    for row in snapshot.history.rows:
        progress.take_report(row)
    for event in snapshot.history.events:
        progress.take_event(event)
