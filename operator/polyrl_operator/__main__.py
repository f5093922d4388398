"""`python -m polyrl_operator`: the operator. Every flag is also read from the environment as POLYRL_<FLAG>.

Exit status: 0 asked to end, 1 failed (it is to be started anew), 2 a flag is wrong. Read next: `app`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from pathlib import Path
from typing import Annotated, Final

import structlog
import typer

from polyrl.cluster.resources.owner import Settings
from polyrl.errors import UserError
from polyrl_operator import logs
from polyrl_operator.app import run
from polyrl_operator.informer.watch import SILENCE_S
from polyrl_operator.options import HEALTH_PORT, METRICS_PORT, Options

log = structlog.get_logger(__name__)

FAILED: Final = 1
USER_ERROR: Final = 2

YOUNG: Final = 5_000
"""Objects made before the collector looks at them, 700 by default: one answer of the API server has hundreds."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _env(name: str) -> str:
    return f"POLYRL_{name}"


@app.command()
def main(  # noqa: PLR0913 - one argument per flag
    manager_image: Annotated[str, typer.Option(envvar=_env("MANAGER_IMAGE"), help="Image of managers.")],
    trainer_image: Annotated[str, typer.Option(envvar=_env("TRAINER_IMAGE"), help="Default image of trainers.")],
    rollout_image: Annotated[str, typer.Option(envvar=_env("ROLLOUT_IMAGE"), help="Default image of rollouts.")],
    namespace: Annotated[
        list[str] | None, typer.Option(envvar=_env("NAMESPACE"), help="Namespace whose jobs are run; repeatable.")
    ] = None,
    all_namespaces: Annotated[bool, typer.Option(envvar=_env("ALL_NAMESPACES"), help="Run jobs of all.")] = False,
    nodes: Annotated[bool, typer.Option(envvar=_env("NODES"), help="Watch nodes and NodeClaims.")] = True,
    lease_namespace: Annotated[str, typer.Option(envvar=_env("LEASE_NAMESPACE"), help="Of the Lease.")] = "default",
    lease_name: Annotated[str, typer.Option(envvar=_env("LEASE_NAME"), help="Of the Lease.")] = "polyrl-operator",
    image_pull_policy: Annotated[str, typer.Option(envvar=_env("IMAGE_PULL_POLICY"))] = "IfNotPresent",
    cluster_domain: Annotated[str, typer.Option(envvar=_env("CLUSTER_DOMAIN"))] = "cluster.local",
    trainer_priority_class: Annotated[str, typer.Option(envvar=_env("TRAINER_PRIORITY_CLASS"))] = "",
    rollout_priority_class: Annotated[str, typer.Option(envvar=_env("ROLLOUT_PRIORITY_CLASS"))] = "",
    host: Annotated[str, typer.Option(envvar=_env("HOST"), help="Address of both ports.")] = "0.0.0.0",
    metrics_port: Annotated[int, typer.Option(envvar=_env("METRICS_PORT"))] = METRICS_PORT,
    health_port: Annotated[int, typer.Option(envvar=_env("HEALTH_PORT"))] = HEALTH_PORT,
    kubeconfig: Annotated[
        Path | None, typer.Option(envvar="KUBECONFIG", help="Outside a cluster; default: the user's.")
    ] = None,
    watch_silence: Annotated[
        float, typer.Option(envvar=_env("WATCH_SILENCE"), min=1, help="Seconds after which a silent watch begins anew.")
    ] = SILENCE_S,
    log_level: Annotated[str, typer.Option(envvar=_env("LOG_LEVEL"), help="debug, info, warning, error.")] = "info",
) -> None:
    """Runs PolyRLJobs as pods until it is asked to end."""
    options = Options(
        settings=Settings(
            manager_image=manager_image,
            trainer_image=trainer_image,
            rollout_image=rollout_image,
            image_pull_policy=image_pull_policy,
            cluster_domain=cluster_domain,
            trainer_priority_class=trainer_priority_class,
            rollout_priority_class=rollout_priority_class,
        ),
        namespaces=_namespaces(namespace or [], all_namespaces),
        lease_namespace=lease_namespace,
        lease_name=lease_name,
        identity=os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}",
        watch_nodes=nodes,
        host=host,
        metrics_port=metrics_port,
        health_port=health_port,
        kubeconfig=kubeconfig,
        silence_s=watch_silence,
    )
    try:
        logs.configure(log_level)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--log-level") from None
    try:
        _run(options)
    except UserError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(USER_ERROR) from None
    except Exception:
        log.exception("the operator cannot go on, and is to be started anew")
        raise typer.Exit(FAILED) from None


def _run(options: Options) -> None:
    """Spares the collector first. What was loaded stays for good, and need not be looked through again with every few
    thousand objects that events and answers are read into; these hold no cycles, and go without it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG)
    asyncio.run(run(options))


def _namespaces(named: list[str], everywhere: bool) -> tuple[str, ...] | None:
    if everywhere == bool(named):
        raise typer.BadParameter("give either --namespace, once or more, or --all-namespaces")
    return None if everywhere else tuple(dict.fromkeys(named))


if __name__ == "__main__":
    app()
