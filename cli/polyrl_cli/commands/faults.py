"""Faults on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from polyrl_cli.chaos.kinds import MAX_SECONDS, ChaosAction, Direction, Target
from polyrl_cli.commands.options import Context, Kubeconfig, Namespace, On, RunOrJob, echo, refuse_flags, require_job

SEED_BITS: Final = 32
"""Size of a drawn seed; short enough to be typed again."""


def chaos(  # noqa: PLR0913 - each is a flag
    action: Annotated[ChaosAction, typer.Argument(help="What to do.", show_default=False)],
    run: RunOrJob = None,
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

        refuse_flags({"--namespace": namespace, "--kubeconfig": kubeconfig, "--context": context}, "--on kubernetes")
        folder = find_run(None if run is None else Path(run))
        done = f"{folder.root}: {asyncio.run(ask_runner(folder.control, request))}"
    else:
        from polyrl_cli.remote.chaos import inject_on_cluster
        from polyrl_cli.remote.cluster import ClusterOptions

        job = require_job(run, "chaos ACTION")
        done = inject_on_cluster(job, request, ClusterOptions(kubeconfig, context, namespace=namespace))
    echo(f"{done} (seed {seed})")
