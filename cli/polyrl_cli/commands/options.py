"""Arguments that several commands take, and how lines are printed."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

RUN_FAILED: Final = 1

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
RunOrJob = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="A run's folder; default: the newest under runs/. On a cluster: the job."),
]
Step = Annotated[int | None, typer.Option(min=0, help="Of this step's checkpoint; default: of the newest.")]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name of a PolyRLJob on a cluster.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace; default: the manifest's, else the context's.")
]
Kubeconfig = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Kubeconfig; default: $KUBECONFIG, else ~/.kube/config.")
]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig; default: its current one.")]


class On(StrEnum):
    """Where a manifest runs."""

    HERE = "here"
    """As processes of this machine."""
    KUBERNETES = "kubernetes"
    """As pods of the cluster that the kubeconfig names."""


OnWhat = Annotated[On, typer.Option(help="A run on this machine, or a job on a cluster.")]


def require_job(given: str | None, command: str) -> str:
    """The name of a job on a cluster. Raises UserError when none was given: there is no newest one."""
    if given is None:
        from polyrl.errors import UserError

        raise UserError(f"name the job: polyrl {command} JOB --on kubernetes")
    return given


def print_lines(lines: list[str]) -> None:
    """Prints them in order."""
    for line in lines:
        echo(line)


def echo(line: str, *, err: bool = False) -> None:
    """Prints a line that may hold what models, user code or other machines wrote."""
    from polyrl.history.foreign_text import printable

    typer.echo(printable(line, lines=True), err=err)


def refuse_flags(given: dict[str, Any], meant_for: str) -> None:
    """Raises UserError for the first flag that was given."""
    from polyrl.errors import UserError

    for flag, value in given.items():
        if value is not None:
            raise UserError(f"{flag}: only means something with {meant_for}")
