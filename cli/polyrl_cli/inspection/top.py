"""`polyrl top [RUN]`: the picture that `polyrl run` shows, from any other terminal, with who waits for whom."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from pydantic import ValidationError
from rich.console import Console
from rich.live import Live

from polyrl.errors import PolyRLError, UserError
from polyrl.history.foreign_text import printable
from polyrl.manifest.job import PolyRLJob
from polyrl_cli.inspection.run_facts import is_locked, read_facts
from polyrl_cli.local.run_folder import RunFolder, find_run
from polyrl_cli.report.progress import SHOWN_WAITS, Progress, picture
from polyrl_cli.report.terminal import terminal
from polyrl_cli.report.timeline import MetricsTail, read_metrics, read_timeline

REREAD_EVERY_S: Final = 1.0
"""Between two readings of the run's files; a person sees no more."""
FIRST_ANSWER_S: Final = 3.0
"""What a manager gets for its first status before the picture is shown without one."""


def show_top(run: Path | None, *, once: bool) -> None:
    """Shows the run until it ends or the user has seen enough; once only where nobody watches a terminal. Raises
    UserError when there is no such run, or its manifest cannot be read."""
    folder, console = find_run(run), terminal()
    tail = MetricsTail(folder.metrics)  # before all rows are read, so that none falls between
    progress = begun(folder)
    with suppress(KeyboardInterrupt):
        asyncio.run(_watch(folder, progress, tail, console, once=once or not console.is_terminal))
    if not is_locked(folder):
        progress.outcome = f"  {read_facts(folder, time.time()).state.value}"
    console.print(picture(progress, console.width))


def begun(folder: RunFolder) -> Progress:
    """What the files say of the run until now. Its clock stands still when nobody is at work."""
    try:
        job = PolyRLJob.model_validate_json(folder.job.read_bytes())
    except ValidationError as error:
        raise UserError(f"{folder.job}: not the manifest of a run: {error.errors()[0]['msg']}") from error
    events, rows = read_timeline(folder.timeline), read_metrics(folder.metrics)
    newest = max([event.time for event in events[-1:]] + [row.time for row in rows[-1:]], default=time.time())
    clock: Callable[[], float] = time.time if is_locked(folder) else lambda: newest
    # A run that was resumed counts from its newest start, as the events' own seconds do.
    began = events[-1].time - events[-1].t if events else newest
    progress = Progress(printable(job.metadata.name), job.spec, clock, began)
    for row in rows:
        progress.take_report(row)
    return progress


async def _watch(folder: RunFolder, progress: Progress, tail: MetricsTail, console: Console, *, once: bool) -> None:
    seen = asyncio.Event()
    _take_events(folder, progress)
    if not is_locked(folder):
        return
    asking = asyncio.create_task(ask_manager(folder, progress, seen))
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(seen.wait(), FIRST_ANSWER_S)
        if once:
            return
        with Live(get_renderable=lambda: picture(progress, console.width), console=console, transient=True):
            while is_locked(folder):
                await asyncio.sleep(REREAD_EVERY_S)
                for row in tail.read():
                    progress.take_report(row)
                _take_events(folder, progress)
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


def _take_events(folder: RunFolder, progress: Progress) -> None:
    """All there are by now."""
    for event in read_timeline(folder.timeline)[len(progress.fleet) :]:
        progress.take_event(event)


async def ask_manager(folder: RunFolder, progress: Progress, seen: asyncio.Event) -> None:
    """Follows the manager; says why where it cannot, and tries again: a run that has just begun has none yet."""
    while True:
        try:
            await _follow(folder, progress, seen)
        except FileNotFoundError:
            progress.waits = ["the manager has not said yet where it listens"]
        except ModuleNotFoundError as error:
            progress.waits = [f"asking the manager needs {error.name}: pip install 'polyrl[operator]'"]
        except (OSError, ValueError, PolyRLError) as error:
            progress.waits = [f"the manager cannot be asked: {printable(str(error))}"]
        await asyncio.sleep(REREAD_EVERY_S)


async def _follow(folder: RunFolder, progress: Progress, seen: asyncio.Event) -> None:
    # An ended run is shown without what this needs.
    from polyrl_cli.local.manager import manager_of

    async with manager_of(folder) as client:
        await client.find()
        async for status in client.watch():
            waits = await client.waits()
            progress.take(status, ())
            progress.waits = [printable(wait) for wait in waits.waits[:SHOWN_WAITS]] if waits else []
            seen.set()
