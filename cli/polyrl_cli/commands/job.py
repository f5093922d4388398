"""From a manifest to a run: begin one, check it, run it, go on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyrl_cli.commands.options import (
    RUN_FAILED,
    Checked,
    Context,
    Kubeconfig,
    ManifestFile,
    Namespace,
    On,
    Overrides,
    ShowPrints,
    echo,
    print_lines,
    refuse_flags,
)
from polyrl_cli.manifests.starter import Task


def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to.", show_default=False)] = Path(),
    task: Annotated[
        Task, typer.Option(help="digits: a minute on two cores; chat: a model of a Hub, on a GPU.")
    ] = Task.DIGITS,
) -> None:
    """Write a job to begin with: a short manifest, a reward, ten rows and a test of the reward."""
    from polyrl_cli.manifests.starter import init_lines

    print_lines(init_lines(folder, task))


def validate(
    file: ManifestFile,
    sets: Overrides = None,
    check: Annotated[
        bool, typer.Option(help="Read all rows and the model's config; import user code and call the reward on a row.")
    ] = True,
) -> None:
    """Check a manifest, all rows, model config and code; every fault is shown with its line."""
    from polyrl_cli.manifests.load import validation_report

    print_lines(validation_report(file, sets or [], check=check))


def gpu_plan(
    file: ManifestFile,
    sets: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU that is planned on: H100-80GB, or bytes as 80Gi; default: this machine's.")
    ] = None,
    rollout_gpu: Annotated[str | None, typer.Option(help="The rollouts' GPU, where it is another.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs in all; default: as many as the job asks for.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, sizes in bytes.")] = False,
) -> None:
    """Plan a job's GPU memory: what each GPU holds, whether it fits, and what to change; nothing is loaded or run."""
    from polyrl_cli.local.plan import plan_lines

    lines, fits = plan_lines(file, sets or [], gpu, rollout_gpu=rollout_gpu, gpus=gpus, as_json=as_json)
    print_lines(lines)
    if not fits:
        raise typer.Exit(RUN_FAILED)


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
    print_lines(lines)
    if not scored:
        raise typer.Exit(RUN_FAILED)


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

        refuse_flags(cluster, "--on kubernetes")
        raise typer.Exit(run_command(file, overrides, out, resume=resume, show_prints=show_prints, check=check))
    from polyrl_cli.remote.cluster import ClusterOptions
    from polyrl_cli.remote.run import DETACHED, run_on_kubernetes

    refuse_flags({"--out": out, "--resume": resume, "--show-prints": show_prints or None}, "--on here")
    options = ClusterOptions(kubeconfig, context, namespace=namespace)
    try:
        raise typer.Exit(run_on_kubernetes(file, overrides, options, echo))
    except KeyboardInterrupt:
        echo(DETACHED)
        raise


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
        echo(text.removesuffix("\n"))
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from error
