"""`polyrl run`: a manifest in, a run's folder and an exit code out.

    load and check the manifest -> make the folder -> LocalRun until its end -> summary.json, run.png

Exit codes: 0 done · 1 the run failed · 2 the input is wrong · 128 + signal when stopped (130 after Ctrl-C).
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from polyrl.errors import InvalidManifest, UserError
from polyrl.forks import ForkServer
from polyrl.history import results
from polyrl.history.cost import run_cost
from polyrl.history.fleet import seconds_by_pool
from polyrl.history.losses import losses
from polyrl.local.gpu_assignment import assignment_line, with_gpus
from polyrl.local.planner import RunEnd
from polyrl.manifest.job import PolyRLJob, read_job
from polyrl.manifest.recipe import RecipeSpec
from polyrl.worker import RunLocation, Workers, workers_of
from polyrl_cli.local import run_folder
from polyrl_cli.local.chaos import FaultSchedule, listening
from polyrl_cli.local.feasibility import feasibility
from polyrl_cli.local.loaded import loaded_libraries
from polyrl_cli.local.manager import LocalManager
from polyrl_cli.local.ownership import take_over
from polyrl_cli.local.process_fleet import ProcessFleet
from polyrl_cli.local.run_folder import RunFolder
from polyrl_cli.local.runner import LocalRun
from polyrl_cli.manifests.load import check_contents, check_files, load_for_this_machine, notes, read_manifest
from polyrl_cli.report import summary
from polyrl_cli.report.panel import print_summary
from polyrl_cli.report.prints import PrintsTail
from polyrl_cli.report.progress import Progress, ProgressView
from polyrl_cli.report.terminal import terminal
from polyrl_cli.report.timeline import MetricsTail, Timeline, read_metrics, read_timeline
from polyrl_trainer.data.hub import fetch, is_fetched

FAILED: Final = 1
SIGNALLED: Final = 128
"""Added to a signal's number, as shells do."""

LOG_LINES: Final = 20
"""How many lines of a worker's log are shown when its end is the run's end: a traceback's last part."""

SHOW_EVERY_S: Final = 0.25
"""Between two reads of metrics.jsonl, to which another process appends without notice."""


@dataclass(frozen=True, kw_only=True)
class EndedRun:
    """A run that is over."""

    job: PolyRLJob
    folder: RunFolder
    run_epoch: int
    end: RunEnd
    run: LocalRun
    stopped_by: signal.Signals | None
    began: float
    """Unix seconds."""
    took_s: float


def run_command(
    file: Path,
    overrides: list[str],
    out: Path | None,
    *,
    resume: Path | None,
    base: Path | None = None,
    show_prints: bool = False,
    check: bool = True,
) -> int:
    """Runs the manifest at `file` here; its relative paths begin at `base`, else beside it. Returns the exit code;
    raises UserError when the input is wrong. `check` looks at rows, model config and code first, which takes seconds;
    without it the trainer finds their faults later."""
    if resume is not None and out is not None:
        raise UserError(f"--out {out}: a resumed run goes on in its own folder; leave --out away")
    resumed = None if resume is None else _taken_over(resume, f"--resume {resume}")
    job = load_for_this_machine(file, overrides)
    # A run's own job.json has every field, so it shows none that the user wrote in vain.
    remarks = notes(job) if base is None else []
    base = base or file.parent
    check_files(job, file, overrides, base=base)
    console = terminal()
    if resumed is not None and _is_done(resumed, job):
        more = f"polyrl resume {resumed.root} --set spec.recipe.algorithm.steps=N"
        console.print(f"{resumed.root}: done, nothing is left to do; more steps go on from it: {more}", soft_wrap=True)
        return 0
    _fetch(job.spec.recipe, base, console)
    here = feasibility(job, base, resumed)
    if here.faults:
        raise InvalidManifest(read_manifest(file, overrides).describe(here.faults))
    with loaded_libraries() as forks:
        unchecked = check_contents(job, file, overrides, base=base) if check else []
        for note in [*remarks, *here.notes, *unchecked]:
            console.print(f"note: {note}", soft_wrap=True)
        folder = resumed or run_folder.new_run_folder(out, job.metadata.name, datetime.now(UTC))
        with run_folder.locked(folder):
            done = run_folder.kept_state(folder).rl_steps  # before anything is changed there: it may refuse
            run_epoch = run_folder.prepare_folder(folder, job, base)
            place = RunLocation(
                run=str(folder.root),
                manifest_dir=str(base.resolve()),
                python=sys.executable,
                run_epoch=run_epoch,
                cpus=len(os.sched_getaffinity(0)),
                resume=str(folder.root) if resume is not None else None,
            )
            console.print(
                f"{job.metadata.name}: seed {job.spec.recipe.seed}, everything goes to {folder.root}", soft_wrap=True
            )
            if line := assignment_line(here.assignment):
                console.print(line, soft_wrap=True)
            wanted = with_gpus(workers_of(job.spec, place), here.assignment)
            return execute(job, wanted, folder, run_epoch, console, forks, show_prints=show_prints, done=done)


def _is_done(folder: RunFolder, job: PolyRLJob) -> bool:
    """Whether its trainer got to the end of this very recipe."""
    return run_folder.is_finished(folder) and read_job(folder.job).spec.recipe == job.spec.recipe


def _taken_over(root: Path, named: str) -> RunFolder:
    folder = run_folder.existing_folder(root, named)
    take_over(folder.root)
    return folder


def _fetch(recipe: RecipeSpec, base: Path, console: Console) -> None:
    """Before any process starts, so that its progress is seen; the trainer finds it in the cache."""
    for one in recipe.sources:
        if is_fetched(one, base):
            where, what = "there" if one.is_uri else "the Hub", "file" if one.is_rows else "folder"
            console.print(f"{one.path} is no {what} here: taken from {where}, or from what was downloaded before")
            fetch(one, base)


def resume_command(run: Path, overrides: list[str], *, show_prints: bool = False, check: bool = True) -> int:
    """Goes on with the run in this folder as it began, but for the overrides. Exit code and errors as `run_command`."""
    folder = _taken_over(run, str(run))
    base = run_folder.manifest_dir(folder)
    return run_command(folder.job, overrides, None, resume=folder.root, base=base, show_prints=show_prints, check=check)


def execute(
    job: PolyRLJob,
    wanted: Workers,
    folder: RunFolder,
    run_epoch: int,
    console: Console,
    forks: ForkServer | None = None,
    *,
    show_prints: bool = False,
    done: int = 0,
) -> int:
    """Runs the workers in a prepared folder to the end, writes and prints the summary. `done`: RL steps of the
    checkpoint that it goes on from. `forks`: what makes processes that it takes. Returns the exit code; raises
    UserError when the trainer says that the input is wrong."""
    return asyncio.run(_run(job, wanted, folder, run_epoch, console, forks, show_prints, done))


async def _run(
    job: PolyRLJob,
    wanted: Workers,
    folder: RunFolder,
    run_epoch: int,
    console: Console,
    forks: ForkServer | None,
    show_prints: bool,
    done: int,
) -> int:
    began = time.time()
    progress = Progress(job.metadata.name, job.spec, time.monotonic)
    if done:  # an evaluation that comes before the next step is not of the model that the run began with
        progress.steps["rl"] = done
    view = ProgressView(progress, console)
    timeline = Timeline(folder.timeline, time.monotonic, view.event)
    client = LocalManager(folder.endpoints, folder.keys / "operator.key", run_epoch)
    run = LocalRun(wanted, ProcessFleet(folder.logs, forks), client, timeline, folder.keys)
    prints = PrintsTail(folder.prints) if show_prints else None
    showing = asyncio.create_task(_show(run, progress, view, MetricsTail(folder.metrics), prints))
    try:
        async with listening(folder.control, run.inject_fault):
            end = await run.run(FaultSchedule(job.spec.fault_injection, done))
            stopped_by = run.stopped_by
    finally:
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)
        if prints is not None:
            view.printed(prints.read())
        view.close()
        timeline.close()
    took_s = time.time() - began
    if stopped_by is not None and run_folder.is_finished(folder):
        # Whoever asked came too late: there is nothing to go on with.
        end, stopped_by = RunEnd(ok=True, why="the trainer is done"), None
    ended = EndedRun(
        job=job, folder=folder, run_epoch=run_epoch, end=end, run=run, stopped_by=stopped_by, began=began, took_s=took_s
    )
    return _conclude(ended, console)


async def _show(
    run: LocalRun, progress: Progress, view: ProgressView, tail: MetricsTail, prints: PrintsTail | None
) -> None:
    while True:
        if prints is not None:
            view.printed(prints.read())
        for report in tail.read():
            progress.take_report(report)
        progress.take(run.status, run.conditions)
        view.update()
        await asyncio.sleep(SHOW_EVERY_S)


def _conclude(ended: EndedRun, console: Console) -> int:
    made, folder = _summary(ended), ended.folder
    reports, events = read_metrics(folder.metrics), read_timeline(folder.timeline)
    refused = ""
    try:
        fresh = folder.summary.with_name(".summary.json")  # whole, or not at all
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(made)) + b"\n")
        fresh.replace(folder.summary)
        if reports:
            # matplotlib takes longer to import than all that a run needs to begin.
            from polyrl_cli.report.plot import draw_run

            draw_run(f"{made.job}, seed {made.seed}", reports, events, folder.plot)
    except OSError as error:
        refused = f"{folder.root}: summary.json and run.png cannot be written: {error.strerror}"
    print_summary(made, folder.root, console, results.rewards(reports))
    console.print(refused, soft_wrap=True, end="\n" if refused else "")
    if made.outcome != "succeeded" and not ended.end.user_error:
        newest = run_folder.newest_checkpoint(folder)
        start = "its beginning, since nothing was saved" if newest is None else newest.name
        console.print(f"polyrl resume {shlex.quote(str(folder.root))} goes on from {start}", soft_wrap=True)
    return _exit_code(ended, console) or FAILED * bool(refused)


def _exit_code(ended: EndedRun, console: Console) -> int:
    if ended.stopped_by is not None:
        return SIGNALLED + ended.stopped_by
    if ended.end.ok:
        return 0
    if ended.end.worker is not None:
        log = ended.folder.log_of(ended.end.worker)
        sentence = run_folder.last_words(log)
        if ended.end.user_error and sentence:
            raise UserError(sentence)
        console.print(f"\nThe end of {log}:", soft_wrap=True)
        console.print("\n".join(run_folder.end_of_log(log, LOG_LINES)), soft_wrap=True)
    return FAILED


def _summary(ended: EndedRun) -> summary.Summary:
    folder, status = ended.folder, ended.run.status
    whole_run = read_metrics(folder.metrics)
    reports = [report for report in whole_run if report.time >= ended.began]
    events = [event for event in read_timeline(folder.timeline) if event.time >= ended.began]
    outcome = "interrupted" if ended.stopped_by is not None else "succeeded" if ended.end.ok else "failed"
    worker = ended.end.worker
    lost = losses(events, reports)
    return summary.Summary(
        job=ended.job.metadata.name,
        outcome=outcome,
        cause="" if outcome == "succeeded" or worker is None else run_folder.cause_of(folder.log_of(worker)),
        why=ended.end.why,
        seed=ended.job.spec.recipe.seed,
        run_epoch=ended.run_epoch,
        wall_seconds=round(ended.took_s, 3),
        seconds=summary.seconds_by_stage(reports, ended.began, ended.took_s),
        learned=results.courses(whole_run),
        evaluations=results.evaluations(whole_run),
        samples=status.samples,
        samples_trained=results.samples_trained(reports),
        samples_evaluated=results.samples_evaluated(reports),
        tokens=status.tokens,
        bytes_per_token=summary.bytes_per_token(status),
        gpus={seen.name: list(seen.gpus) for seen in ended.run.observed if seen.gpus},
        cost=run_cost(ended.job.spec.pricing, seconds_by_pool(events, ended.began + ended.took_s)),
        preemptions=len(lost),
        losses=lost,
        step_parts=summary.step_parts(reports),
        **msgspec.structs.asdict(summary.read_trainer_result(folder.trainer_result)),
    )
