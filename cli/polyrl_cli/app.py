"""`polyrl`: the command line. Commands import what they need when they are called, so that `--help` is quick.

Exit status: 0 done, 1 the run failed, 2 the user's input is wrong (one line per fault, no traceback), 130 interrupted.
Any other exception is a bug in PolyRL and keeps its traceback.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from polyrl_cli.chaos.kinds import MAX_SECONDS, ChaosAction, Direction, Target
from polyrl_cli.manifests.starter import Task

RUN_FAILED: Final = 1
USER_ERROR: Final = 2
INTERRUPTED: Final = 130
"""128 + SIGINT, as shells report it."""

SEED_BITS: Final = 32
"""Size of a drawn seed; short enough to be typed again."""


class _Commands(TyperGroup):
    """Turns the errors that PolyRL raises on purpose into sentences and exit statuses."""

    def invoke(self, ctx: Any) -> Any:
        from polyrl.errors import PolyRLError, UserError

        try:
            return super().invoke(ctx)
        except PolyRLError as error:
            from polyrl_cli.report.foreign_text import printable

            typer.echo(printable(str(error), lines=True), err=True)
            raise typer.Exit(USER_ERROR if isinstance(error, UserError) else RUN_FAILED) from None
        except ModuleNotFoundError as error:
            from polyrl_cli.extras import EXTRA_OF, missing_packages

            module = (error.name or "").partition(".")[0]
            if module not in EXTRA_OF:
                raise
            command = f"polyrl {ctx.invoked_subcommand}"
            typer.echo(missing_packages(command, [module], EXTRA_OF[module]), err=True)
            raise typer.Exit(USER_ERROR) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Rich help costs 0.2 s of import for a table.
    rich_markup_mode=None,
)

ManifestFile = Annotated[Path, typer.Argument(metavar="FILE", help="A PolyRLJob manifest (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a field, as spec.rollout.maxReplicas=4; repeatable."),
]
ShowPrints = Annotated[
    bool, typer.Option("--show-prints", help="Show what the reward and the environment print, as it comes.")
]
Checked = Annotated[bool, typer.Option(help="Look at rows, model config and code first, as validate does.")]
NewestRun = Annotated[
    Path | None,
    typer.Argument(metavar="[RUN]", help="A run's folder; default: the newest under runs/.", show_default=False),
]


Step = Annotated[int | None, typer.Option(min=0, help="Of this step's checkpoint; default: of the newest.")]


class On(StrEnum):
    """Where a manifest runs."""

    HERE = "here"
    """As processes of this machine."""
    KUBERNETES = "kubernetes"
    """As pods of the cluster that the kubeconfig names."""


class PodRole(StrEnum):
    """What a job's pod is for; the reserved engine is a container of the trainer's."""

    MANAGER = "manager"
    """Holds the ledger of samples."""
    TRAINER = "trainer"
    """Trains, and publishes weights."""
    ROLLOUT = "rollout"
    """Runs one engine that generates."""


JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name of a PolyRLJob on a cluster.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace; default: the manifest's, else the context's.")
]
Kubeconfig = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Kubeconfig; default: $KUBECONFIG, else ~/.kube/config.")
]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig; default: its current one.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Reinforcement learning of language models on a few reserved trainers and many preemptible rollouts."""


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to.", show_default=False)] = Path(),
    task: Annotated[
        Task, typer.Option(help="digits: a minute on two cores; chat: a model of a Hub, on a GPU.")
    ] = Task.DIGITS,
) -> None:
    """Write a job to begin with: a short manifest, a reward, ten rows and a test of the reward."""
    from polyrl_cli.manifests.starter import init_lines

    _print(init_lines(folder, task))


@app.command()
def validate(
    file: ManifestFile,
    sets: Overrides = None,
    check: Annotated[
        bool, typer.Option(help="Read all rows and the model's config; import user code and call the reward on a row.")
    ] = True,
) -> None:
    """Check a manifest, all rows, model config and code; every fault is shown with its line."""
    from polyrl_cli.manifests.load import validation_report

    _print(validation_report(file, sets or [], check=check))


@app.command()
def reward(
    file: ManifestFile,
    row: Annotated[int, typer.Option(min=1, help="Row of the first file of prompts, from 1.")] = 1,
    response: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the policy wrote; default: the row's answer or response.")
    ] = None,
    sets: Overrides = None,
) -> None:
    """Try the reward on a row, without a run: reward, metrics, time, and what it printed."""
    from polyrl_cli.manifests.reward import reward_lines

    lines, scored = reward_lines(file, sets or [], row, response)
    _print(lines)
    if not scored:
        raise typer.Exit(RUN_FAILED)


@app.command()
def run(  # noqa: PLR0913 - each is a flag
    file: ManifestFile,
    sets: Overrides = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Override spec.recipe.seed.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the run; default: runs/NAME-TIME.")] = None,
    name: Annotated[str | None, typer.Option(help="Override metadata.name.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Continue the run in this folder.")] = None,
    show_prints: ShowPrints = False,
    check: Checked = True,
    on: Annotated[On, typer.Option(help="Run processes on this machine, or pods on a cluster.")] = On.HERE,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Run a manifest on this machine, or on a cluster."""
    from polyrl_cli.manifests.load import own_overrides

    overrides = [*(sets or []), *own_overrides(seed, name)]
    cluster = {"--namespace": namespace, "--kubeconfig": kubeconfig, "--context": context}
    if on is On.HERE:
        from polyrl_cli.extras import require_for_run

        require_for_run("polyrl run")
        from polyrl_cli.local.run import run_command

        _refuse_flags(cluster, "--on kubernetes")
        raise typer.Exit(run_command(file, overrides, out, resume=resume, show_prints=show_prints, check=check))
    from polyrl_cli.remote.cluster import ClusterOptions
    from polyrl_cli.remote.run import DETACHED, run_on_kubernetes

    _refuse_flags({"--out": out, "--resume": resume, "--show-prints": show_prints or None}, "--on here")
    options = ClusterOptions(kubeconfig, context, namespace=namespace)
    try:
        raise typer.Exit(run_on_kubernetes(file, overrides, options, _echo))
    except KeyboardInterrupt:
        typer.echo(DETACHED)
        raise


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    sets: Overrides = None,
    show_prints: ShowPrints = False,
    check: Checked = True,
) -> None:
    """Go on with a run of this machine from its newest checkpoint, as it began but for what --set changes."""
    from polyrl_cli.extras import require_for_run

    require_for_run("polyrl resume")
    from polyrl_cli.local.run import resume_command

    raise typer.Exit(resume_command(run, sets or [], show_prints=show_prints, check=check))


def _print(lines: list[str]) -> None:
    for line in lines:
        _echo(line)


def _echo(line: str) -> None:
    """Prints a line that may hold what models, user code or other machines wrote."""
    from polyrl_cli.report.foreign_text import printable

    typer.echo(printable(line, lines=True))


def _refuse_flags(given: dict[str, Any], meant_for: str) -> None:
    from polyrl.errors import UserError

    for flag, value in given.items():
        if value is not None:
            raise UserError(f"{flag}: only means something with {meant_for}")


@app.command()
def status(job: JobName, namespace: Namespace = None, kubeconfig: Kubeconfig = None, context: Context = None) -> None:
    """Print the state of a job on a cluster."""
    from polyrl_cli.remote.cluster import ClusterOptions
    from polyrl_cli.remote.status import status_lines

    _print(status_lines(job, ClusterOptions(kubeconfig, context, namespace=namespace)))


@app.command()
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
        _echo,
    )


@app.command("ls")
def list_of_runs(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Folder of runs; default: runs.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List runs, the newest first: state, steps, reward, last evaluation, duration, age."""
    from polyrl_cli.inspection.runs import list_runs

    list_runs(folder, as_json=as_json)


@app.command()
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


@app.command("samples")
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


@app.command()
def why(run: NewestRun = None) -> None:
    """Print who waits for whom in a run, for what, since when and until when."""
    from polyrl_cli.inspection.why import why_lines

    _print(why_lines(run))


@app.command()
def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    sample: Annotated[str, typer.Argument(metavar="SAMPLE", help="A sample's name, as 12.3.")],
) -> None:
    """Print the history of one sample: engines, versions, tokens, reward, batch, reasons."""
    from polyrl_cli.inspection.explain import explain_lines

    _print(explain_lines(run, sample))


@app.command()
def report(
    run: NewestRun = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write; default: report.html in the run's folder.")
    ] = None,
) -> None:
    """Write a run, live or finished, as one HTML page that needs no network."""
    from polyrl_cli.page.page import write_report

    typer.echo(f"The page lies in {write_report(run, out)}")


@app.command()
def check(run: NewestRun = None) -> None:
    """Verify a run's invariants from its journal; exit status 1 when one is broken."""
    from polyrl_cli.inspection.check import check_lines

    lines, holds = check_lines(run)
    _print(lines)
    if not holds:
        raise typer.Exit(RUN_FAILED)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the model.")],
    step: Step = None,
) -> None:
    """Copy a run's model: weights, tokenizer, chat template and model card, for transformers, SGLang or a Hub."""
    from polyrl_cli.model.export import export_lines

    _print(export_lines(run, target, step))


@app.command()
def get(
    job: JobName,
    target: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    step: Step = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Fetch the model, the metrics and the result of a job on a cluster."""
    from polyrl_cli.model.get import get_from_cluster
    from polyrl_cli.remote.cluster import ClusterOptions

    options = ClusterOptions(kubeconfig, context, namespace=namespace)
    get_from_cluster(job, target, step, options, typer.echo)


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or an exported model's.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What the model answers.")],
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer; default: the run's.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=10, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draw.")] = 0,
    answers: Annotated[int, typer.Option("--n", min=1, max=1024, help="How many answers.")] = 1,
    step: Step = None,
) -> None:
    """Let a run's model answer a prompt."""
    from polyrl_cli.model.generate import HowToAnswer, generate_lines

    wanted = HowToAnswer(max_tokens=max_tokens, temperature=temperature, seed=seed, answers=answers)
    for answer in generate_lines(run, prompt, wanted, step):
        typer.echo(answer)


@app.command()
def chaos(  # noqa: PLR0913 - each is a flag
    action: Annotated[ChaosAction, typer.Argument(help="What to do.", show_default=False)],
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run's folder; default: the newest under runs/. On a cluster: the job."),
    ] = None,
    role: Annotated[Target, typer.Option(help="Kind of process; an agent includes its engine.")] = Target.AGENT,
    worker: Annotated[str, typer.Option(metavar="NAME", help="The victim, as rollout-1; default: one is drawn.")] = "",
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the draw; default: a new one, printed.")] = None,
    lasts: Annotated[
        float,
        typer.Option("--for", metavar="SECONDS", min=0.1, max=MAX_SECONDS, help="How long; with preempt: the notice."),
    ] = 5.0,
    speed: Annotated[float, typer.Option(min=0.01, max=0.99, help="With slow: the share of time it runs.")] = 0.1,
    direction: Annotated[
        Direction, typer.Option(help="With partition: messages lost to the agent, from it, or both.")
    ] = Direction.BOTH,
    on: Annotated[On, typer.Option(help="Hit a run on this machine, or a job's pods on a cluster.")] = On.HERE,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Inject a fault on a live run, to see that nothing is lost."""
    import secrets

    from polyrl.errors import UserError
    from polyrl_cli.chaos.faults import FaultRequest

    if seed is None:
        seed = secrets.randbits(SEED_BITS)
    request = FaultRequest(
        action=action, target=role, worker=worker, seed=seed, seconds=lasts, speed=speed, direction=direction
    )
    if on is On.HERE:
        import asyncio

        from polyrl_cli.local.chaos import ask_runner
        from polyrl_cli.local.run_folder import find_run

        _refuse_flags({"--namespace": namespace, "--kubeconfig": kubeconfig, "--context": context}, "--on kubernetes")
        folder = find_run(None if run is None else Path(run))
        done = f"{folder.root}: {asyncio.run(ask_runner(folder.control, request))}"
    else:
        from polyrl_cli.remote.chaos import inject_on_cluster
        from polyrl_cli.remote.cluster import ClusterOptions

        if run is None:
            raise UserError("name the job: polyrl chaos ACTION JOB --on kubernetes")
        done = inject_on_cluster(run, request, ClusterOptions(kubeconfig, context, namespace=namespace))
    typer.echo(f"{done} (seed {seed})")


@app.command()
def crd(
    docs: Annotated[bool, typer.Option("--docs", help="Print the manifest's reference page (Markdown).")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write here instead of to the terminal.")] = None,
) -> None:
    """Print the CustomResourceDefinition of PolyRLJob."""
    from polyrl.errors import UserError
    from polyrl.manifest.schema.reference_page import manifest_page
    from polyrl_cli.manifests.crd import crd_yaml

    text = manifest_page() if docs else crd_yaml()
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from error


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    typer.echo(f"polyrl {installed('polyrl')}")


def main() -> None:
    """Entry point of the `polyrl` command."""
    app()


if __name__ == "__main__":
    main()
