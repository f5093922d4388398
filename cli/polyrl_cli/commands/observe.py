"""What a run does and did: its state, its output, its samples, its history, its page."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from polyrl_cli.commands.options import (
    RUN_FAILED,
    Context,
    JobName,
    Kubeconfig,
    Namespace,
    NewestRun,
    On,
    OnWhat,
    RunOrJob,
    echo,
    print_lines,
    refuse_flags,
    require_job,
)


class PodRole(StrEnum):
    """What a job's pod is for; the reserved engine is a container of the trainer's."""

    MANAGER = "manager"
    """Holds the ledger of samples."""
    TRAINER = "trainer"
    """Trains, and publishes weights."""
    ROLLOUT = "rollout"
    """Runs one engine that generates."""


def status(job: JobName, namespace: Namespace = None, kubeconfig: Kubeconfig = None, context: Context = None) -> None:
    """Print the state of a job on a cluster."""
    from polyrl_cli.remote.cluster import ClusterOptions
    from polyrl_cli.remote.status import status_lines

    print_lines(status_lines(job, ClusterOptions(kubeconfig, context, namespace=namespace)))


def logs(
    job: JobName,
    role: Annotated[PodRole | None, typer.Option(help="Only pods of this role; default: all.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job is over.")] = False,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Print what a job's pods on a cluster have printed."""
    from polyrl.worker import Role
    from polyrl_cli.remote.cluster import ClusterOptions
    from polyrl_cli.remote.logs import print_logs

    print_logs(
        job,
        None if role is None else Role(role),
        follow,
        ClusterOptions(kubeconfig, context, namespace=namespace),
        echo,
    )


def list_of_runs(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Folder of runs; default: runs.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List runs, the newest first: state, steps, reward, last evaluation, duration, age."""
    from polyrl_cli.inspection.runs import list_runs

    list_runs(folder, as_json=as_json, note=lambda sentence: echo(sentence, err=True))


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Folders of two runs or more.")],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw their rewards there (.png, .svg, .pdf).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Print the settings in which runs differ, and their results, side by side."""
    from polyrl_cli.inspection.compare import compare_runs

    compare_runs(runs, plot, as_json=as_json)


def kept_samples(  # noqa: PLR0913 - each is a flag
    run: NewestRun = None,
    step: Annotated[int | None, typer.Option(min=0, help="Of this step; default: the newest.")] = None,
    group: Annotated[int | None, typer.Option(min=0, help="Of this group, whatever its step.")] = None,
    evaluation: Annotated[bool, typer.Option("--evaluation", help="Of an evaluation; default: of training.")] = False,
    best: Annotated[bool, typer.Option("--best", help="The highest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The lowest rewards first.")] = False,
    drawn: Annotated[bool, typer.Option("--random", help="Drawn, only among those kept at random.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 10,
    full: Annotated[bool, typer.Option("--full", help="Long texts whole.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, texts whole.")] = False,
) -> None:
    """Print what the model wrote: prompts, responses and their rewards."""
    from polyrl.errors import UserError
    from polyrl_cli.inspection.kept_samples import Order, SampleQuery
    from polyrl_cli.inspection.samples import show_samples

    orders = {Order.BEST: best, Order.WORST: worst, Order.RANDOM: drawn}
    asked = [order for order, given in orders.items() if given]
    if len(asked) > 1:
        raise UserError("name one of --best, --worst and --random")
    order = asked[0] if asked else Order.AS_KEPT
    query = SampleQuery(step=step, group=group, evaluation=evaluation, order=order, limit=limit)
    show_samples(run, query, full=full, as_json=as_json)


def top(
    run: RunOrJob = None,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and do not stay.")] = False,
    on: OnWhat = On.HERE,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Watch a run: stages, reward, throughput, fleet, waits, losses, cost."""
    if on is On.HERE:
        from polyrl_cli.inspection.top import show_top

        refuse_flags({"--namespace": namespace, "--kubeconfig": kubeconfig, "--context": context}, "--on kubernetes")
        show_top(None if run is None else Path(run), once=once)
        return
    from polyrl_cli.remote.cluster import ClusterOptions
    from polyrl_cli.remote.top import show_job_top

    show_job_top(require_job(run, "top"), ClusterOptions(kubeconfig, context, namespace=namespace), once=once)


def why(run: NewestRun = None) -> None:
    """Print who waits for whom in a run, for what, since when and until when."""
    from polyrl_cli.inspection.why import why_lines

    print_lines(why_lines(run))


def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    sample: Annotated[str, typer.Argument(metavar="SAMPLE", help="A sample's name, as 12.3.")],
) -> None:
    """Print the history of one sample: engines, versions, tokens, reward, batch, reasons."""
    from polyrl_cli.inspection.explain import explain_lines

    print_lines(explain_lines(run, sample))


def report(
    run: RunOrJob = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write; default: report.html in the run's folder, or JOB.html."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Show it to a browser of this machine as the run goes on, until Ctrl-C.")
    ] = False,
    on: OnWhat = On.HERE,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Write a run, live or finished, as one HTML page that needs no network; or show it live."""
    from polyrl_cli.page.live import serve_page
    from polyrl_cli.page.page import make_page_of_run, write_page

    if live:
        refuse_flags({"--out": out}, "a page that is written; --live shows it")
    if on is On.HERE:
        refuse_flags({"--namespace": namespace, "--kubeconfig": kubeconfig, "--context": context}, "--on kubernetes")
        file, make = make_page_of_run(None if run is None else Path(run))
    else:
        from polyrl_cli.remote.cluster import ClusterOptions
        from polyrl_cli.remote.manager import page_of_job

        job, options = require_job(run, "report"), ClusterOptions(kubeconfig, context, namespace=namespace)
        file, make = Path(f"{job}.html"), lambda: page_of_job(job, options)
    if live:
        serve_page(make, echo)
        return
    echo(f"The page lies in {write_page(out or file, make())}")


def check(run: NewestRun = None) -> None:
    """Verify a run's invariants from its journal; exit status 1 when one is broken."""
    from polyrl_cli.inspection.check import check_lines

    lines, holds = check_lines(run)
    print_lines(lines)
    if not holds:
        raise typer.Exit(RUN_FAILED)
